"""bfloat16 against float64, beside torchtitan's grouped experts on the same inputs."""

import torch
import torch.nn.functional as F

from tests.moe.parity import run_relay
from tests.support.moe_cases import MoeCase
from titan_relay.moe import RelayOptions

CASE = MoeCase(1, num_tokens=512, dim=64, expert_dim=64, top_k=4, dtype=torch.bfloat16)
# The largest share of torchtitan's own rounding error that is acceptable.
RATIO = 1.2


def grouped_experts_results():
    """The operations of torchtitan's dispatcher and experts on one rank, in bfloat16.

    Rows sorted by expert, ``torch._grouped_mm``, scores applied in float32 to the outputs, and a
    scatter-add; autograd for the gradients.
    """
    data = CASE.data(0)
    x_TD, scores_TK = data.x_TD.requires_grad_(), data.scores_TK.requires_grad_()
    w1, w2, w3 = (weight.requires_grad_() for weight in CASE.weights())
    order_N = torch.argsort(data.ids_TK.view(-1), stable=True)
    token_N = order_N // CASE.top_k
    counts = torch.bincount(data.ids_TK.view(-1), minlength=CASE.num_experts)
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
    wanted = CASE.expected().of_rank(0, num_ranks=1)
    ours = run_relay(CASE, None, RelayOptions(max_rows_per_step=64))
    theirs = grouped_experts_results()
    for (name, mine), other, truth in zip(ours.items(), theirs, wanted, strict=True):
        error = root_mean_square_error(mine, truth)
        bar = root_mean_square_error(other, truth)
        assert error < RATIO * bar, (name, error, bar)
