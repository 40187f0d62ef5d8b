"""Forward of some consecutive experts over the rows routed to them, in plain PyTorch.

Steps of at most R rows, each of one expert or of several: gathers, scores and the activation are
done for a whole step, products expert by expert, all into buffers that already exist.

Shape legend: T tokens, K top-k, N = T * K routed rows, n rows of this step (at most R), m of them
of one expert, b of a block, D model dimension, F expert hidden dimension, g experts held together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from relay_kernels.activation import SwiGLU, activate_
from relay_kernels.rows import RoutedTokens, Segment
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import ForwardWorkspace

# Up to here it pays to gather and activate the rows of several experts together.
_SHARED_STEP_ROWS = 512


def step_forward_experts_(
    out_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: ForwardWorkspace,
) -> None:
    """``experts.forward_experts_`` in plain PyTorch."""
    w1, w3, w2 = transposed(weights.w1_gFD), transposed(weights.w3_gFD), transposed(weights.w2_gDF)
    workspace.index.begin(tokens)
    for step in steps(tokens.segments, workspace.max_rows):
        num_rows = step.last - step.first
        token_n, score_n1 = workspace.index.of(step.first, step.last)
        x_nD = torch.index_select(tokens.x_TD, 0, token_n, out=workspace.x_RD[:num_rows])
        h1_nF, h3_nF = workspace.h1_RF[:num_rows], workspace.h3_RF[:num_rows]
        x, h1, h3 = cut(step, x_nD, h1_nF, h3_nF)
        products_(h1, x, w1, weights.b1_gF, step)
        products_(h3, x, w3, weights.b3_gF, step)
        # The score is applied to F columns before the down projection, not to D after it.
        activate_(h1_nF, h3_nF, activation).mul_(score_n1)
        y_nD, y = x_nD, x  # inputs have been used, and results take their place
        products_(y, h1, w2, None, step)
        if weights.b2_gD is not None:
            (score,) = cut(step, score_n1.squeeze(1))
            for expert, y_mD, score_m in zip(step.experts, y, score, strict=True):
                y_mD.addr_(score_m, weights.b2_gD[expert])
        add_rows_(out_TD, token_n, y_nD, step)


class Step(NamedTuple):
    """The sorted rows ``first <= i < last``, computed together.

    ``sizes[j]`` of them, in order, are of expert ``experts[j]``, whose own first row is among them
    if ``begins[j]``.
    """

    first: int
    last: int
    experts: list[int]
    sizes: list[int]
    begins: list[bool]


def steps(segments: Sequence[Segment], max_rows: int) -> Iterator[Step]:
    """The rows of adjoining segments, at most ``max_rows`` at a time.

    Experts with few rows share a step, and those with too many have several. Example: segments
    ``[(0, 1), (1, 1), (1, 3), (3, 8)]`` by 4 rows are steps over the rows ``(0, 3)`` of experts 0
    and 2, and ``(3, 7)`` and ``(7, 8)`` of expert 3.
    """
    shared = min(max_rows, _SHARED_STEP_ROWS)
    waiting: list[int] = []  # small experts
    first = 0
    for expert, (start, end) in enumerate(segments):
        if waiting and end - first > shared:
            yield _step_of(waiting, segments)
            waiting = []
        while end - start > max_rows:
            begins = start == segments[expert][0]
            yield Step(start, start + max_rows, [expert], [max_rows], [begins])
            start += max_rows
        if start == end:
            continue
        if start > segments[expert][0]:
            yield Step(start, end, [expert], [end - start], [False])
            continue
        if not waiting:
            first = start
        waiting.append(expert)
    if waiting:
        yield _step_of(waiting, segments)


def _step_of(experts: list[int], segments: Sequence[Segment]) -> Step:
    """All rows of some experts."""
    sizes = [segments[expert][1] - segments[expert][0] for expert in experts]
    return Step(
        segments[experts[0]][0], segments[experts[-1]][1], experts, sizes, [True] * len(experts)
    )


# The rows of each of a step's experts. Every view costs about a microsecond, so that what several
# products use is cut once.
Cut = tuple[torch.Tensor, ...]


def cut(step: Step, *tensors: torch.Tensor) -> list[Cut]:
    """Each tensor's rows by expert: views that autograd does not know, which take half the time."""
    return [tensor.unsafe_split_with_sizes(step.sizes) for tensor in tensors]


def products_(
    out: Cut,
    left: Cut,
    right: Sequence[torch.Tensor],
    bias_gB: torch.Tensor | None,
    step: Step,
) -> None:
    """``out = left right[expert] + bias[expert]``, expert by expert."""
    if bias_gB is None:
        for expert, left_mA, out_mB in zip(step.experts, left, out, strict=True):
            torch.mm(left_mA, right[expert], out=out_mB)
    else:
        for expert, left_mA, out_mB in zip(step.experts, left, out, strict=True):
            torch.addmm(bias_gB[expert], left_mA, right[expert], out=out_mB)


def add_rows_(
    total_TD: torch.Tensor, token_n: torch.Tensor, value_nD: torch.Tensor, step: Step
) -> None:
    """Sum a step's rows into their tokens, in a fixed order.

    A token may be there once for each expert. A CPU sums row by row; a device sums in any order, so
    there each expert's rows, with no token twice, are summed by themselves.
    """
    if total_TD.device.type == "cpu":
        total_TD.index_add_(0, token_n, value_nD)
        return
    for token_m, value_mD in zip(*cut(step, token_n, value_nD), strict=True):
        total_TD.index_add_(0, token_m, value_mD)


def transposed(weights_gAB: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each expert's matrix as ``B x A``."""
    return weights_gAB.transpose(1, 2).unbind(0)
