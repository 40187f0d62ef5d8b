"""The relay on one rank, without torch.distributed, against the dense truth.

In bfloat16 beside torchtitan's grouped experts on the same inputs.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.moe.parity import check_case, run_relay
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, SwiGLU

NARROW = MoeCase(1, num_tokens=512, dim=64, expert_dim=64, top_k=4, dtype=torch.bfloat16)
# The largest share of torchtitan's own rounding error that is acceptable.
MOST_OF_THEIR_ROUNDING = 1.2


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


def grouped_experts_results():
    """The operations of torchtitan's dispatcher and experts on one rank, in bfloat16.

    Rows sorted by expert, ``torch._grouped_mm``, scores applied in float32 to the outputs, and a
    scatter-add; autograd for the gradients.
    """
    data = NARROW.data(0)
    x_TD, scores_TK = data.x_TD.requires_grad_(), data.scores_TK.requires_grad_()
    w1, w2, w3 = (weight.requires_grad_() for weight in NARROW.weights())
    order_N = torch.argsort(data.ids_TK.view(-1), stable=True)
    token_N = order_N // NARROW.top_k
    counts = torch.bincount(data.ids_TK.view(-1), minlength=NARROW.num_experts)
    offsets = counts.cumsum(0).to(torch.int32)
    rows_ND = x_TD[token_N]
    hidden = F.silu(torch._grouped_mm(rows_ND, w1.transpose(1, 2), offs=offsets))
    hidden = hidden * torch._grouped_mm(rows_ND, w3.transpose(1, 2), offs=offsets)
    y_ND = torch._grouped_mm(hidden, w2.transpose(1, 2), offs=offsets)
    y_ND = (y_ND.float() * scores_TK.view(-1)[order_N][:, None]).bfloat16()
    out_TD = torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
    out_TD.backward(data.dout_TD)
    return [out_TD.detach(), *(leaf.grad for leaf in (x_TD, scores_TK, w1, w2, w3))]


def root_mean_square_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_rounding_is_no_worse_than_that_of_grouped_experts():
    wanted = NARROW.expected().of_rank(0, num_ranks=1)
    ours = run_relay(NARROW, None, RelayOptions(max_rows_per_step=64))
    theirs = grouped_experts_results()
    for (name, mine), other, truth in zip(ours.items(), theirs, wanted, strict=True):
        error = root_mean_square_error(mine, truth)
        bar = root_mean_square_error(other, truth)
        assert error < MOST_OF_THEIR_ROUNDING * bar, (name, error, bar)
