"""The relay on one rank, without torch.distributed, against the dense reference."""

import pytest
import torch

from tests.moe.parity import check_case
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, SwiGLU


@pytest.mark.parametrize("skew", SKEWS)
def test_every_result_matches_the_reference(skew):
    check_case(MoeCase(num_ranks=1, skew=skew), None, RelayOptions())


@pytest.mark.parametrize(
    "case",
    [
        MoeCase(num_ranks=1, num_tokens=0),
        MoeCase(num_ranks=1, num_tokens=1),
        MoeCase(num_ranks=1, num_experts=1, top_k=1),
        MoeCase(num_ranks=1, num_experts=5, top_k=5),
        MoeCase(num_ranks=1, num_tokens=61, dim=7, expert_dim=3, num_experts=11, top_k=3),
        MoeCase(num_ranks=1, dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_ordinary_extremes(case, rows):
    check_case(case, None, RelayOptions(max_rows_per_step=rows))


@pytest.mark.parametrize(
    "activation", [SwiGLU(), SwiGLU(alpha=1.702, limit=0.6, up_offset=1.0), SwiGLU(limit=0.3)]
)
@pytest.mark.parametrize("has_biases", [False, True])
def test_biases_and_clamped_activation(activation, has_biases):
    case = MoeCase(num_ranks=1, num_tokens=40, has_biases=has_biases)
    check_case(case, None, RelayOptions(max_rows_per_step=4), activation)
