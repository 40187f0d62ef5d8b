"""The registered ops: routing, forward, backward, and the gradient that ties them together.

They are opaque to autograd, activation checkpointing and ``torch.compile``: those see three ops
with inputs and outputs, and none of the ring's in-place sums and messages.

Saved for backward: the op's inputs and the sorted rows, 4 bytes per routed copy. Not the output,
and nothing of any expert.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, e experts of this rank, E experts.
"""

from typing import Any

import torch

from relay_kernels import ExpertWeights, KernelChoiceError, SwiGLU, uses_triton
from titan_relay.moe.call import RelayCall, Wants, find_ring, layer_shape
from titan_relay.moe.errors import RelayUsageError
from titan_relay.moe.fake import fake_backward, fake_forward, fake_route
from titan_relay.moe.layer import layer_backward, layer_forward
from titan_relay.moe.options import options_from_spec
from titan_relay.moe.routing import TokenSlices, routed_tokens, sort_rows
from titan_relay.recompute.relay_checkpoint import value_is_needed

NUM_GRADIENTS = 8  # x, scores, w1, w2, w3, b1, b2, b3
_SECOND_ORDER = (
    "relay_moe has no second-order gradient: its backward rebuilds hidden activations itself; "
    "do not use create_graph=True through it"
)


@torch.library.custom_op("titan_relay::route", mutates_args=())
def route(
    expert_ids_TK: torch.Tensor,
    num_experts: int,
    num_slices: int,
    slice_length: int,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows_N`` (int32, ids' device) and counts (int64, host); see ``routing.sort_rows``."""
    return sort_rows(expert_ids_TK, num_experts, TokenSlices(num_slices, slice_length), kernels)


route.register_fake(fake_route)


@torch.library.custom_op("titan_relay::moe", mutates_args=())
def moe_forward(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    counts: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
    b1_eF: torch.Tensor | None,
    b2_eD: torch.Tensor | None,
    b3_eF: torch.Tensor | None,
    group_name: str,
    options: str,
    activation: list[float],
) -> torch.Tensor:
    """``out_TD``; zeros in a recompute that does not need the value."""
    if not value_is_needed():
        return torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    weights = ExpertWeights(w1_eFD, w2_eDF, w3_eFD, b1_eF, b2_eD, b3_eF).map(
        torch.Tensor.contiguous
    )
    call = _call("forward", x_TD, scores_TK, weights, group_name, options, activation)
    tokens = routed_tokens(x_TD, scores_TK, rows_N, counts, call.shape.num_experts)
    return layer_forward(call, tokens, counts, weights)


@moe_forward.register_fake
def _(x_TD: torch.Tensor, scores_TK: torch.Tensor, *rest: Any) -> torch.Tensor:
    _, _, *tensors, group_name, options, _ = rest
    if not torch.compiler.is_compiling() and not value_is_needed():
        return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    return fake_forward(x_TD, scores_TK, tensors, group_name, options)


@torch.library.custom_op("titan_relay::moe_backward", mutates_args=())
def moe_backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    counts: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
    b1_eF: torch.Tensor | None,
    b2_eD: torch.Tensor | None,
    b3_eF: torch.Tensor | None,
    group_name: str,
    options: str,
    activation: list[float],
    wants: list[bool],
) -> list[torch.Tensor]:
    """Gradients of x, scores, w1, w2, w3, b1, b2, b3; empty tensors for those not wanted."""
    weights = ExpertWeights(w1_eFD, w2_eDF, w3_eFD, b1_eF, b2_eD, b3_eF).map(
        torch.Tensor.contiguous
    )
    call = _call("backward", x_TD, scores_TK, weights, group_name, options, activation)
    tokens = routed_tokens(x_TD, scores_TK, rows_N, counts, call.shape.num_experts)
    gradients = layer_backward(call, Wants(*wants), dout_TD, tokens, counts, weights)
    given = [gradients.dx_TD, gradients.dscores_TK]
    given += gradients.weights.tensors() if gradients.weights is not None else []
    given += [None] * (NUM_GRADIENTS - len(given))
    return [x_TD.new_empty(0) if tensor is None else tensor for tensor in given]


@moe_backward.register_fake
def _(
    dout_TD: torch.Tensor, x_TD: torch.Tensor, scores_TK: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    _, _, *tensors, group_name, options, _, wants = rest
    return fake_backward(x_TD, scores_TK, tensors, group_name, options, wants)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, group_name, options, activation = inputs
    ctx.save_for_backward(*tensors)
    ctx.static = (group_name, options, activation)


def _backward(ctx: Any, dout_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad
    wants = [needs[0], needs[1], any(needs[4:10])]
    gradients = torch.ops.titan_relay.moe_backward(dout_TD, *ctx.saved_tensors, *ctx.static, wants)
    dx_TD, dscores_TK, *dweights = gradients
    by_input = [dx_TD, dscores_TK, None, None, *dweights, None, None, None]
    return tuple(gradient if need else None for gradient, need in zip(by_input, needs, strict=True))


def _no_second_order(ctx: Any, *_: Any) -> None:
    raise RuntimeError(_SECOND_ORDER)


moe_forward.register_autograd(_backward, setup_context=_setup_context)
moe_backward.register_autograd(_no_second_order)


def _call(
    operation: str,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    weights: ExpertWeights,
    group_name: str,
    options: str,
    activation: list[float],
) -> RelayCall:
    ring = find_ring(group_name)
    num_ranks = 1 if ring is None else ring.link.size
    parsed = options_from_spec(options)
    try:
        uses_triton(parsed.kernels, x_TD.device, x_TD.dtype)
    except KernelChoiceError as error:
        raise RelayUsageError(f"RelayOptions: {error}") from error
    shape = layer_shape(x_TD, scores_TK, weights, num_ranks, parsed)
    return RelayCall(shape, parsed, SwiGLU(*activation), ring, operation)
