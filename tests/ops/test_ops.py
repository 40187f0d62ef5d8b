"""The ops: values and gradients against float64, what they save, fake tensors against real."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops import reference
from titan_relay import ops
from titan_relay.measure import LiveBytes

# Float32 sums of up to a hundred products; bfloat16 rounds results once, to 2^-9 relative.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mask_of(positions: torch.Tensor, order: torch.Tensor | None = None) -> ops.DocumentMask:
    """The mask of rows with these positions, keys in `order`."""
    index = torch.arange(positions.shape[1], dtype=torch.int32).expand_as(positions)
    key_index = index if order is None else order.int().expand_as(positions)
    return ops.DocumentMask(index, (index - positions).int(), key_index)


def table_of(head_dim: int, num_positions: int, theta: float) -> torch.Tensor:
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
ORDER = torch.tensor([0, 1, 7, 8, 2, 3, 4, 5, 6])  # as context parallelism gathers keys
MASK, SHUFFLED = mask_of(POSITIONS), mask_of(POSITIONS, ORDER)
TABLE = table_of(6, 9, 100.0)
FLOAT32_TABLE = TABLE.float()

Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor]]
CASES: dict[str, Case] = {
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, w, 1e-5),
        lambda x, w: reference.rms_norm(x, w, 1e-5),
        [random(2, 9, 3, 8), random(8, seed=1)],
    ),
    "rms_norm of no rows": (
        lambda x, w: ops.rms_norm(x, w, 1e-5),
        lambda x, w: reference.rms_norm(x, w, 1e-5),
        [random(0, 8), random(8, seed=1)],
    ),
    "rope": (
        lambda x: ops.rope(x, FLOAT32_TABLE, POSITIONS),
        lambda x: reference.rope(x, 100.0, POSITIONS),
        [random(2, 9, 3, 6)],
    ),
    "rope, one row of positions for all": (
        lambda x: ops.rope(x, FLOAT32_TABLE, POSITIONS[1:]),
        lambda x: reference.rope(x, 100.0, POSITIONS[1:]),
        [random(3, 9, 1, 6)],
    ),
    "float32_linear": (
        ops.float32_linear,
        lambda x, w: x @ w.T,
        [random(2, 9, 8), random(5, 8, seed=1)],
    ),
    "attention, grouped heads": (
        lambda q, k, v: ops.document_attention(q, k, v, MASK, 0.4),
        lambda q, k, v: reference.attention(q, k, v, MASK.allowed(), 0.4),
        [random(2, 9, 6, 4), random(2, 9, 2, 4, seed=1), random(2, 9, 2, 4, seed=2)],
    ),
    "attention, narrow values": (
        lambda q, k, v: ops.document_attention(q, k, v, MASK, 0.4),
        lambda q, k, v: reference.attention(q, k, v, MASK.allowed(), 0.4),
        [random(2, 9, 3, 5), random(2, 9, 3, 5, seed=1), random(2, 9, 3, 2, seed=2)],
    ),
    "attention, keys in another order": (
        lambda q, k, v: ops.document_attention(q, k, v, SHUFFLED, 0.4),
        lambda q, k, v: reference.attention(q, k, v, SHUFFLED.allowed(), 0.4),
        [random(2, 9, 2, 4), random(2, 9, 1, 4, seed=1), random(2, 9, 1, 4, seed=2)],
    ),
}


def attention_of(num_rows: int, num_tokens: int, num_heads: int, num_groups: int) -> Case:
    """Documents of up to a hundred tokens, the first row's mask for all."""
    positions = torch.arange(num_tokens).remainder(97).expand(num_rows, num_tokens)
    mask = mask_of(positions)
    shapes = [(num_rows, num_tokens, heads, 4) for heads in (num_heads, num_groups, num_groups)]
    return (
        lambda q, k, v: ops.document_attention(q, k, v, mask, 0.4),
        lambda q, k, v: reference.attention(q, k, v, mask.allowed(), 0.4),
        [random(*shape, seed=seed) for seed, shape in enumerate(shapes)],
    )


LONG_POSITIONS = torch.arange(700).expand(2, 700)
LONG_TABLE = table_of(6, 700, 100.0).float()

# More rows than one chunk, or one block of probabilities, has room for.
LARGE_CASES: dict[str, Case] = {
    "rms_norm": (*CASES["rms_norm"][:2], [random(4096, 64), random(64, seed=1)]),
    "float32_linear": (*CASES["float32_linear"][:2], [random(4096, 64), random(8, 64, seed=1)]),
    "rope": (
        lambda x: ops.rope(x, LONG_TABLE, LONG_POSITIONS),
        lambda x: reference.rope(x, 100.0, LONG_POSITIONS),
        [random(2, 700, 16, 6)],
    ),
    "attention, queries in blocks": attention_of(1, 800, 2, 1),
    "attention, heads in blocks": attention_of(1, 300, 8, 8),
    "attention, rows in blocks": attention_of(9, 300, 1, 1),
}


def value_and_gradients(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, max(1, out.numel()), dtype=torch.float64)[: out.numel()]
    gradients = torch.autograd.grad(out, inputs, weights.view(out.shape).to(out.dtype))
    return [out.detach(), *gradients]


def assert_close_to_float64(case: Case, dtype: torch.dtype) -> None:
    function, expected_function, tensors = case
    rounded = [tensor.to(dtype).double() for tensor in tensors]
    actual = value_and_gradients(function, tensors, dtype)
    for mine, wanted in zip(
        actual, value_and_gradients(expected_function, rounded, torch.float64), strict=True
    ):
        assert mine.shape == wanted.shape
        scale = wanted.abs().max() if wanted.numel() else 1.0
        # The output's gradient is rounded too, so two roundings for what follows from it.
        assert ((mine.double() - wanted).abs() <= 2 * TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    assert_close_to_float64(CASES[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE_CASES)
def test_many_chunks_give_what_one_would(name: str, dtype: torch.dtype) -> None:
    assert_close_to_float64(LARGE_CASES[name], dtype)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    function, _, tensors = CASES[name]
    if "rope" in name:  # a float64 table for a float64 input

        def function(x: torch.Tensor) -> torch.Tensor:
            positions = POSITIONS[1:] if "one row" in name else POSITIONS
            return ops.rope(x, TABLE, positions)

    if tensors[0].numel():
        inputs = [t.clone().requires_grad_() for t in tensors]
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


OP_CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (torch.ops.titan_relay.rms_norm, (random(3, 8), random(8), 1e-5)),
    "rope": (torch.ops.titan_relay.rope, (random(2, 9, 3, 6), TABLE, POSITIONS, False)),
    "float32_linear": (torch.ops.titan_relay.float32_linear, (random(3, 8), random(5, 8))),
    "attention": (
        torch.ops.titan_relay.attention,
        (
            *(random(2, 9, 4, 4), random(2, 9, 2, 4), random(2, 9, 2, 3)),
            *(MASK.index_BL, MASK.start_BL, MASK.key_index_BS, 0.4),
        ),
    ),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_registration(name: str) -> None:
    op, args = OP_CALLS[name]
    floats = [
        arg.float().requires_grad_()
        if isinstance(arg, torch.Tensor) and arg.is_floating_point()
        else arg
        for arg in args
    ]
    torch.library.opcheck(op, floats)


def step(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes held after forward beyond the output, and the peak of forward and backward."""
    for tensor in tensors:
        tensor.requires_grad_()
    with LiveBytes() as tracker:
        out = function(*tensors)
        held = tracker.live_bytes - out.untyped_storage().nbytes()
        out.backward(out.detach())
    return held, tracker.peak_bytes


MEASURED = {
    "rms_norm": (CASES["rms_norm"][0], [(4096, 64), (64,)], 0),
    "rope": (CASES["rope"][0], [(2, 9, 2048, 6)], 0),
    "float32_linear": (CASES["float32_linear"][0], [(4096, 64), (8, 64)], 0),
    "attention": (
        lambda q, k, v: ops.document_attention(q, k, v, mask_of(torch.arange(512)[None]), 0.4),
        [(1, 512, 8, 32), (1, 512, 2, 32), (1, 512, 2, 32)],
        # The log-sum-exp, and the mask, which this test makes inside.
        512 * 8 * 4 + 2 * 512 * 4,
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_saves_its_inputs_only_and_fake_tensors_have_the_same_peak(name: str) -> None:
    function, shapes, extra_bytes = MEASURED[name]
    held, peak = step(function, [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes])
    assert held <= extra_bytes
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        fake_held, fake_peak = step(function, fakes)
    assert fake_held == held
    # Shape functions take a chunk of half a MiB for one tensor; its parts overlap less.
    assert abs(fake_peak - peak) <= 2**18


def test_a_plan_of_a_batch_of_any_size_takes_one_block() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(10**10, 64, heads, 16) for heads in (4, 2))
        mask = mask_of(torch.arange(64)[None])
        assert ops.document_attention(q, k, k, mask, 0.4).shape == q.shape
