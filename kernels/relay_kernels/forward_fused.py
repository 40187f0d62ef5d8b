"""Forward of some consecutive experts over the rows routed to them, by the fused ops.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, g experts held together.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.forward_step import Segment
from relay_kernels.ops_forward import down_rows_, down_scatter_, sum_rows_, up_gate_
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace_fused import FusedForwardWorkspace


def fused_forward_experts_(
    out_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: FusedForwardWorkspace,
) -> None:
    """``forward.forward_experts_`` by the fused ops; never waits for the device."""
    shape, a_RF = workspace.shape, workspace.a_RF
    scores_N, top_k = scores_TK.reshape(-1), scores_TK.shape[1]
    offsets_G = device_offsets(segments, x_TD.device)
    for first, last in chunks(segments, workspace.max_rows):
        where = (rows_N, offsets_G, first, last)
        up_gate_(
            a_RF,
            x_TD,
            *where,
            weights.w1_gFD,
            weights.w3_gFD,
            weights.b1_gF,
            weights.b3_gF,
            top_k,
            shape.rows_per_expert,
            activation.alpha,
            activation.limit,
            activation.up_offset,
            shape.kernels,
        )
        down = (weights.w2_gDF, weights.b2_gD, top_k, shape.rows_per_expert, shape.kernels)
        if workspace.y_RD is None or workspace.positions_N is None:
            down_scatter_(out_TD, a_RF, scores_N, *where, *down)
        else:
            y_RD, positions_N = workspace.y_RD, workspace.positions_N
            down_rows_(y_RD, positions_N, a_RF, scores_N, *where, *down)
            sum_rows_(out_TD, y_RD, positions_N, *where, top_k, shape.kernels)


def chunks(segments: Sequence[Segment], max_rows: int) -> Iterator[tuple[int, int]]:
    """``(first, last)``: the rows of all segments in chunks of at most ``max_rows``."""
    start, end = segments[0][0], segments[-1][1]
    for first in range(start, end, max_rows):
        yield first, min(first + max_rows, end)


def device_offsets(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """The g + 1 bounds of adjoining segments, on the device, without waiting for it."""
    assert all(left[1] == right[0] for left, right in itertools.pairwise(segments))
    bounds = [segments[0][0], *(end for _, end in segments)]
    offsets_G = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    return offsets_G.to(device, non_blocking=True)
