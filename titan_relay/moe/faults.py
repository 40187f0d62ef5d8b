"""Values that no layer can work with: ids out of range, repeated ids, NaN and infinity.

A fault is three integers, so that ranks can tell each other: its kind, the token, and a detail (a
position in ``expert_ids_TK``'s row and the id). Ids out of range are always found, because the
counts already show them; the rest costs passes over the inputs and is ``options.check_finite``.

Shape legend: T tokens, K top-k, N = T * K rows, D model dimension.
"""

from typing import NamedTuple

import torch

from titan_relay.moe.errors import NonFiniteError, RelayUsageError
from titan_relay.moe.routing import NO_FAULT, RoutingPlan, fault_of

_NONE, _ID_RANGE, _REPEATED_ID, _X, _SCORES, _REFUSED = range(6)
_FINITE_NAMES = {_X: "x_TD", _SCORES: "scores_TK"}


class Fault(NamedTuple):
    """What is wrong on one rank."""

    kind: int = _NONE
    token: int = 0
    choice: int = 0
    expert_id: int = 0


# Inputs whose shapes or dtypes a rank cannot work with: it says so itself, and the others stop.
REFUSED = Fault(_REFUSED)


def find_fault(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    counts: torch.Tensor,
    *,
    check_finite: bool,
) -> Fault:
    """The first fault of this rank's inputs. With ``check_finite`` it synchronises a device."""
    top_k = scores_TK.shape[1]
    row, expert_id = fault_of(counts)
    if row != NO_FAULT:
        return Fault(_ID_RANGE, *divmod(row, top_k), expert_id)
    if not check_finite:
        return Fault()
    for kind, tensor in ((_X, x_TD), (_SCORES, scores_TK)):
        bad_T = ~torch.isfinite(tensor).all(1)
        if bad_T.any():
            return Fault(kind, int(bad_T.nonzero()[0]))
    return _repeated_id(plan, top_k)


def _repeated_id(plan: RoutingPlan, top_k: int) -> Fault:
    """Rows of one expert are in order of token, so a repeated id makes two neighbours."""
    token_N = torch.div(plan.rows_N, top_k, rounding_mode="floor")
    for expert_id, (start, end) in enumerate(plan.segments()):
        tokens = token_N[start:end]
        same = tokens[1:] == tokens[:-1]
        if same.any():
            position = start + 1 + int(same.nonzero()[0])
            return Fault(_REPEATED_ID, *divmod(int(plan.rows_N[position]), top_k), expert_id)
    return Fault()


def raise_fault(fault: Fault, rank: int, layer: str, num_experts: int) -> None:
    """Raise what ``fault`` on ``rank`` of the group means; nothing when it is none."""
    prefix = f"layer {layer!r}: " if layer else ""
    place = f"on rank {rank} of the expert-parallel group"
    kind, token, choice, expert_id = fault
    if kind == _ID_RANGE:
        raise RelayUsageError(
            f"{prefix}expert_ids_TK[{token}, {choice}] = {expert_id} {place}; ids must be in "
            f"[0, {num_experts})"
        )
    if kind == _REPEATED_ID:
        raise RelayUsageError(
            f"{prefix}expert_ids_TK[{token}, {choice}] = {expert_id} {place} is repeated; the ids "
            "of a token must be distinct"
        )
    if kind in _FINITE_NAMES:
        raise NonFiniteError(
            f"{prefix}{_FINITE_NAMES[kind]} has a NaN or an infinity at token {token} {place}"
        )
