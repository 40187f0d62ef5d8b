"""The fused ops one by one, with the work and the memory traffic that each cannot avoid.

Shape legend: T tokens, N routed rows, D model dimension, F expert hidden dimension, E experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernel_bench import unfused
from kernel_bench.problem import Problem
from relay_kernels import ops_backward, ops_forward


@dataclass(frozen=True)
class Op:
    """One op on all rows of a problem. ``least_bytes``: every operand once, in and out."""

    name: str
    run: Callable[[], object]
    flops: int
    least_bytes: int
    unfused: Callable[[], object]  # the same result without fused kernels
    tuned: tuple[str, ...] = ()  # the kernels that it alone launches, as configurations name them


def ops(problem: Problem, kernels: str) -> Iterator[Op]:
    """Every op; they share the buffers that they are given here."""
    num_experts, expert_dim, dim = problem.weights.w1_gFD.shape
    num_rows, product = problem.num_rows, problem.product_flops
    x_TD, w = problem.x_TD, problem.weights
    a_NF, dh1_NF, dh3_NF = (x_TD.new_empty(num_rows, expert_dim) for _ in range(3))
    y_ND, out_TD = x_TD.new_empty(num_rows, dim), torch.zeros_like(x_TD)
    positions_N = torch.empty(num_rows, dtype=torch.int32, device=x_TD.device)
    scores_N = problem.scores_TK.reshape(-1)
    dscores_N = torch.empty_like(scores_N)
    dw = w.empty_like(num_experts)
    where = (problem.rows_N, problem.offsets_G, 0, num_rows)
    tuning = (problem.top_k, problem.rows_per_expert)
    plain_swiglu = (1.0, float("inf"), 0.0)
    # An expert without rows is still counted as read: there are none in a balanced problem.
    tokens, hidden, rows, matrix = (each.nbytes for each in (x_TD, a_NF, y_ND, w.w1_gFD))
    # Each row is gathered on its own, and sums into memory read what they add to.
    gathered, summed = rows, 2 * tokens

    yield Op(
        "up_gate",
        lambda: ops_forward.up_gate_(
            a_NF, x_TD, *where, w.w1_gFD, w.w3_gFD, None, None, *tuning, *plain_swiglu, kernels
        ),
        2 * product,
        gathered + 2 * matrix + hidden,
        lambda: unfused.up_gate(problem),
        ("up_gate",),
    )
    yield Op(
        "down_scatter",
        lambda: ops_forward.down_scatter_(
            out_TD, a_NF, scores_N, *where, w.w2_gDF, None, *tuning, kernels
        ),
        product,
        hidden + matrix + summed,
        lambda: unfused.down(problem, a_NF),
        ("down",),
    )

    def down_in_order() -> None:
        ops_forward.down_rows_(
            y_ND, positions_N, a_NF, scores_N, *where, w.w2_gDF, None, *tuning, kernels
        )
        ops_forward.sum_rows_(out_TD, y_ND, positions_N, *where, problem.top_k, kernels)

    yield Op(
        "down, deterministic",
        down_in_order,
        product,
        hidden + matrix + 2 * rows + summed,
        lambda: unfused.down(problem, a_NF),
        ("sum_rows",),
    )
    yield Op(
        "hidden_backward",
        lambda: ops_backward.hidden_backward_(
            dh1_NF, dh3_NF, a_NF, dscores_N, x_TD, problem.dout_TD, scores_N, *where,
            w.w1_gFD, w.w2_gDF, w.w3_gFD, None, None, None, *tuning, *plain_swiglu, kernels,
        ),
        3 * product,
        2 * gathered + 3 * matrix + 3 * hidden,
        lambda: unfused.hidden_backward(problem),
        ("hidden_backward",),
    )  # fmt: skip
    yield Op(
        "dx_scatter",
        lambda: ops_backward.dx_scatter_(
            out_TD, dh1_NF, dh3_NF, *where, w.w1_gFD, w.w3_gFD, *tuning, kernels
        ),
        2 * product,
        2 * hidden + 2 * matrix + summed,
        lambda: unfused.dx(problem, dh1_NF, dh3_NF),
        ("dx",),
    )

    def dx_in_order() -> None:
        ops_backward.dx_rows_(
            y_ND, positions_N, dh1_NF, dh3_NF, *where, w.w1_gFD, w.w3_gFD, *tuning, kernels
        )
        ops_forward.sum_rows_(out_TD, y_ND, positions_N, *where, problem.top_k, kernels)

    yield Op(
        "dx, deterministic",
        dx_in_order,
        2 * product,
        2 * hidden + 2 * matrix + 2 * rows + summed,
        lambda: unfused.dx(problem, dh1_NF, dh3_NF),
    )
    yield Op(
        "weight_gradients",
        lambda: ops_backward.weight_gradients_(
            dw.w1_gFD, dw.w2_gDF, dw.w3_gFD, None, None, None, dh1_NF, dh3_NF, a_NF, x_TD,
            problem.dout_TD, scores_N, *where, *tuning, False, kernels,
        ),
        3 * product,
        2 * gathered + 3 * hidden + 3 * matrix,
        lambda: unfused.weight_gradients(problem, dh1_NF, dh3_NF, a_NF),
        ("dw13", "dw2"),
    )  # fmt: skip
