"""The public function: a Mixture-of-Experts layer's experts over a ring of ranks."""

from dataclasses import fields

import torch
import torch.distributed as dist

from relay_kernels import ExpertWeights, SwiGLU
from titan_relay.moe import op  # registers the ops
from titan_relay.moe.call import find_ring
from titan_relay.moe.cross_rank_checks import announce_refusal
from titan_relay.moe.errors import RelayUsageError
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.shapes import token_slices
from titan_relay.private_torch import OpOverload, overload_of
from titan_relay.recompute.relay_checkpoint import note_relay_output

_WEIGHT_NAMES = tuple(f"weights.{field.name}" for field in fields(ExpertWeights))
_BIAS_NAMES = _WEIGHT_NAMES[3:]
_DEFAULT_OPTIONS = RelayOptions()
_DEFAULT_ACTIVATION = SwiGLU()


def relay_moe(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    weights: ExpertWeights,
    group: dist.ProcessGroup | None = None,
    options: RelayOptions = _DEFAULT_OPTIONS,
    activation: SwiGLU = _DEFAULT_ACTIVATION,
) -> torch.Tensor:
    """``out[t] = sum_k scores[t, k] * expert[ids[t, k]](x[t])``, experts spread over ``group``.

    With ``W`` ranks and ``e`` experts per rank, rank ``r`` of the group owns experts
    ``r * e <= j < (r + 1) * e`` of ``E = W * e``.

    Args:
        x_TD: this rank's tokens. Any floating dtype; the arithmetic is done in it.
        scores_TK: the weight of each choice; any floating dtype.
        expert_ids_TK: integer ids in ``[0, E)``, distinct within a token.
        weights: this rank's experts, ``W2 act(W1 x + b1, W3 x + b3) + b2``, in the dtype of
            ``x_TD``: ``ExpertWeights(w1_eFD, w2_eDF, w3_eFD)``, and where there are biases after
            these ``b1_eF, b2_eD, b3_eF``.
        group: the expert-parallel process group; None for one rank. All its ranks call together,
            with the same shapes and options. The group's ring is made at the first call if
            ``relay_ring(group)`` has not made it.
        options: equal on all ranks.
        activation: the gated activation, by default ``silu(h1) * h3``.

    Returns:
        ``out_TD`` in the dtype of ``x_TD``.

    Gradients flow to ``x``, ``scores``, the weights and the biases; those of weights are complete
    sums over the group's tokens, not divided by anything. Saved for backward: the inputs and 4
    bytes per routed copy. Activations of experts are never saved; the backward rebuilds them.

    Raises:
        RelayUsageError: wrong shapes, dtypes or ids; ranks that differ (on every rank).
        RingError: a neighbour died or did not answer within the ring's timeout.
    """
    num_ranks = 1 if group is None else group.size()
    group_name = "" if group is None or num_ranks == 1 else group.group_name
    try:
        _check(x_TD, scores_TK, expert_ids_TK, weights)
    except RelayUsageError:
        ring = find_ring(group_name)
        if ring is not None:
            announce_refusal(ring)
        raise
    slices = token_slices(options.max_tokens_per_rank or x_TD.shape[0], num_ranks, options)
    rows_N, counts = torch.ops.titan_relay.route(
        expert_ids_TK, weights.num_experts * num_ranks, slices.num, slices.length, options.kernels
    )
    out_TD = torch.ops.titan_relay.moe(
        x_TD,
        scores_TK,
        rows_N,
        counts,
        *weights.arguments(),
        group_name,
        options.spec,
        [activation.alpha, activation.limit, activation.up_offset],
    )
    if not torch.compiler.is_compiling():
        note_relay_output(out_TD)
    return out_TD


def relay_ops() -> list[OpOverload]:
    """The ops whose results a selective-checkpointing policy may save.

    Saving both means that a recompute of plain ``torch.utils.checkpoint`` runs no ring, at one
    copy of the tokens per layer. With ``relay_checkpoint`` neither needs saving.
    """
    return [overload_of(op.route), overload_of(op.moe_forward)]


def _check(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    weights: ExpertWeights,
) -> None:
    if not isinstance(weights, ExpertWeights):
        raise RelayUsageError(
            f"relay_moe: weights is a {type(weights).__name__}; it must be "
            "ExpertWeights(w1_eFD, w2_eDF, w3_eFD)"
        )
    by_name = dict(zip(_WEIGHT_NAMES, weights.arguments(), strict=True))
    absent = [name for name in _BIAS_NAMES if by_name[name] is None]
    if absent and len(absent) < len(_BIAS_NAMES):
        raise RelayUsageError(
            f"relay_moe: {', '.join(absent)} must be given where other biases are, or none of them"
        )
    given = {"x_TD": x_TD, "scores_TK": scores_TK, "expert_ids_TK": expert_ids_TK, **by_name}
    for name, value in given.items():
        if name not in absent and not isinstance(value, torch.Tensor):
            raise RelayUsageError(f"relay_moe: {name} is a {type(value).__name__}, not a tensor")
    experts = dict(zip(_WEIGHT_NAMES, weights.tensors(), strict=not absent))
    w1_gFD = weights.w1_gFD
    if x_TD.dim() != 2 or scores_TK.dim() != 2 or w1_gFD.dim() != 3:
        raise RelayUsageError(
            f"relay_moe: x_TD, scores_TK and weights.w1_gFD have {x_TD.dim()}, {scores_TK.dim()} "
            f"and {w1_gFD.dim()} dimensions; they must have 2, 2 and 3"
        )
    num_tokens, dim = x_TD.shape
    num_local, expert_dim, _ = w1_gFD.shape
    _check_shape("scores_TK", scores_TK, (num_tokens, scores_TK.shape[1]))
    _check_shape("expert_ids_TK", expert_ids_TK, tuple(scores_TK.shape))
    sizes = {"F": expert_dim, "D": dim}
    for name, tensor in experts.items():
        letters = name.partition("_g")[2]
        _check_shape(name, tensor, (num_local, *(sizes[letter] for letter in letters)))
    if not x_TD.is_floating_point() or not scores_TK.is_floating_point():
        raise RelayUsageError(
            f"relay_moe: x_TD and scores_TK have dtypes {x_TD.dtype} and {scores_TK.dtype}; "
            "both must be floating"
        )
    for name, tensor in experts.items():
        if tensor.dtype != x_TD.dtype:
            raise RelayUsageError(
                f"relay_moe: {name} has dtype {tensor.dtype}; it must be that of x_TD, {x_TD.dtype}"
            )
    if expert_ids_TK.is_floating_point() or expert_ids_TK.dtype == torch.bool:
        raise RelayUsageError(
            f"relay_moe: expert_ids_TK has dtype {expert_ids_TK.dtype}; it must be an integer dtype"
        )


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise RelayUsageError(
            f"relay_moe: {name} has shape {tuple(tensor.shape)}; it must be {expected}"
        )
