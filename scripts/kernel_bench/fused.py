"""The kernels one by one, with the work and the memory traffic that each cannot avoid.

Shape legend: T tokens, N routed rows, D model dimension, F expert hidden dimension, E experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernel_bench import unfused
from kernel_bench.problem import Problem
from relay_kernels import SwiGLU
from relay_kernels.triton.launch_backward import dx, hidden_backward, weight_gradients
from relay_kernels.triton.launch_forward import down, up_gate
from relay_kernels.workspace import HiddenGradients, OrderedSum


@dataclass(frozen=True)
class Op:
    """One op on all rows of a problem. ``least_bytes``: every operand once, in and out."""

    name: str
    run: Callable[[], object]
    flops: int
    least_bytes: int
    unfused: Callable[[], object]  # the same result without fused kernels
    tuned: tuple[str, ...] = ()  # the kernels that it alone launches, as configurations name them


def ops(problem: Problem) -> Iterator[Op]:
    """Every op; they share the buffers that they are given here."""
    num_experts, expert_dim, dim = problem.weights.w1_gFD.shape
    num_rows, product = problem.num_rows, problem.product_flops
    x_TD, dout_TD, w, chunk = problem.x_TD, problem.dout_TD, problem.weights, problem.chunk
    a_NF, dh1_NF, dh3_NF = (x_TD.new_empty(num_rows, expert_dim) for _ in range(3))
    y_ND, out_TD = x_TD.new_empty(num_rows, dim), torch.zeros_like(x_TD)
    positions_N = torch.empty(num_rows, dtype=torch.int32, device=x_TD.device)
    hidden, ordered = HiddenGradients(dh1_NF, dh3_NF, a_NF), OrderedSum(y_ND, positions_N)
    dscores_N, dw = torch.empty_like(chunk.tokens.scores_N), w.empty_like(num_experts)
    # An expert without rows is still counted as read: there are none in a balanced problem.
    tokens, wide, rows, matrix = (each.nbytes for each in (x_TD, a_NF, y_ND, w.w1_gFD))
    # Each row is gathered on its own, and sums into memory read what they add to.
    gathered, summed = rows, 2 * tokens

    yield Op(
        "up_gate",
        lambda: up_gate(a_NF, chunk, w, SwiGLU()),
        2 * product,
        gathered + 2 * matrix + wide,
        lambda: unfused.up_gate(problem),
        ("up_gate",),
    )
    yield Op(
        "down_scatter",
        lambda: down(out_TD, None, a_NF, chunk, w),
        product,
        wide + matrix + summed,
        lambda: unfused.down(problem, a_NF),
        ("down",),
    )
    yield Op(
        "down, deterministic",
        lambda: down(out_TD, ordered, a_NF, chunk, w),
        product,
        wide + matrix + 2 * rows + summed,
        lambda: unfused.down(problem, a_NF),
        ("sum_rows",),
    )
    yield Op(
        "hidden_backward",
        lambda: hidden_backward(hidden, dscores_N, dout_TD, chunk, w, SwiGLU()),
        3 * product,
        2 * gathered + 3 * matrix + 3 * wide,
        lambda: unfused.hidden_backward(problem),
        ("hidden_backward",),
    )
    yield Op(
        "dx_scatter",
        lambda: dx(out_TD, None, hidden, chunk, w),
        2 * product,
        2 * wide + 2 * matrix + summed,
        lambda: unfused.dx(problem, dh1_NF, dh3_NF),
        ("dx",),
    )
    yield Op(
        "dx, deterministic",
        lambda: dx(out_TD, ordered, hidden, chunk, w),
        2 * product,
        2 * wide + 2 * matrix + 2 * rows + summed,
        lambda: unfused.dx(problem, dh1_NF, dh3_NF),
    )
    yield Op(
        "weight_gradients",
        lambda: weight_gradients(dw, hidden, dout_TD, chunk, False),
        3 * product,
        2 * gathered + 3 * wide + 3 * matrix,
        lambda: unfused.weight_gradients(problem, dh1_NF, dh3_NF, a_NF),
        ("dw13", "dw2"),
    )
