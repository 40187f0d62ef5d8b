"""``route_rows``, by Triton and by PyTorch, against a loop over rows."""

import pytest
import torch

from relay_kernels import route_rows
from tests.kernels.problem import DEVICE

# The interpreter's blocks have 16 rows.
CASES = {
    "several blocks, an idle expert": (19, 3, 5, [0, 1, 2, 4]),
    "one expert takes all": (20, 1, 4, [2]),
    "K = E": (9, 4, 4, [0, 1, 2, 3]),
    "one row": (1, 1, 1, [0]),
    "no tokens": (0, 2, 3, [0, 1]),
}


def ids_of(num_tokens, top_k, used):
    random = torch.Generator().manual_seed(1)
    order = torch.rand(num_tokens, len(used), generator=random).argsort(1)[:, :top_k]
    return torch.tensor(used)[order].to(DEVICE)


def truth(ids_TK, num_experts, num_slices, slice_length):
    """Rows and bounds, by looking at every row for every key."""
    ids = ids_TK.flatten().tolist()
    rows, bounds = [], [0]
    for key in range(num_experts * num_slices):
        expert, part = divmod(key, num_slices)
        for row, each in enumerate(ids):
            if each == expert and row // ids_TK.shape[1] // slice_length == part:
                rows.append(row)
        bounds.append(len(rows))
    return rows, bounds


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_bounds(case, num_slices, dtype):
    num_tokens, top_k, num_experts, used = CASES[case]
    ids_TK = ids_of(num_tokens, top_k, used).to(dtype)
    length = max(1, -(-num_tokens // num_slices))
    wanted = truth(ids_TK, num_experts, num_slices, length)
    for kernels in ("triton", "torch"):
        rows_N, bounds_C = route_rows(ids_TK, num_experts, num_slices, length, kernels)
        assert (rows_N.dtype, bounds_C.dtype) == (torch.int32, torch.int32)
        assert (rows_N.tolist(), bounds_C.tolist()) == wanted, kernels


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_an_id_out_of_range_shows_in_the_bounds(wrong, kernels):
    ids_TK = torch.tensor([[0, 1], [wrong, 2], [2, 1]], device=DEVICE)
    rows_N, bounds_C = route_rows(ids_TK, 3, 1, 3, kernels)
    begin, end = int(bounds_C[0]), int(bounds_C[-1])
    assert end - begin == 5
    assert rows_N[begin:end].tolist() == [0, 1, 5, 3, 4]


@pytest.mark.parametrize("wrong", [-1, 3, 2**30, 2**31, 2**32, 2**32 + 1, 2**40, -(2**32)])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_an_id_out_of_range_shows_however_large_it_is(kernels, wrong):
    ids_TK = torch.tensor([[wrong, 0], [0, 1], [1, 2]], device=DEVICE)
    for num_slices, slice_length in ((1, 3), (4, 1)):
        rows_N, bounds = route_rows(ids_TK, 3, num_slices, slice_length, kernels)
        assert bounds[-1] - bounds[0] == 5
        assert 0 not in rows_N[bounds[0] : bounds[-1]].tolist()
