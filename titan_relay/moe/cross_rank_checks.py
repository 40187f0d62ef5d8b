"""Before a forward moves anything: do all ranks mean the same call?

Ranks decide alike without talking because everything they decide from is the same on every rank.
If it is not, message sizes differ, and a transport then hangs or aborts. So each forward compares a
few host-side numbers over the ring's control channel, once, and a difference is the same error on
every rank. The same message carries a rank's faulty inputs, so that all ranks stop, not one.

Values that no layer can work with: ids out of range, repeated ids, NaN and infinity.

A fault is three integers, so that ranks can tell each other: its kind, the token, and a detail (a
position in ``expert_ids_TK``'s row and the id). Ids out of range are always found, because the
counts already show them; the rest costs passes over the inputs and is ``options.check_finite``.

Shape legend: T tokens, K top-k, N = T * K rows, D model dimension.
"""

import json
import zlib
from typing import Any, NamedTuple

import torch

from relay_kernels import RoutedTokens
from titan_relay.moe.call import RelayCall
from titan_relay.moe.errors import NonFiniteError, RelayUsageError, RingError
from titan_relay.moe.ring import Ring
from titan_relay.moe.routing import NO_FAULT, counts_matrix, fault_of

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


def find_fault(tokens: RoutedTokens, counts: torch.Tensor, *, check_finite: bool) -> Fault:
    """The first fault of this rank's inputs. With ``check_finite`` it synchronises a device."""
    row, expert_id = fault_of(counts)
    if row != NO_FAULT:
        return Fault(_ID_RANGE, *divmod(row, tokens.top_k), expert_id)
    if not check_finite:
        return Fault()
    for kind, tensor in ((_X, tokens.x_TD), (_SCORES, tokens.scores_TK)):
        bad_T = ~torch.isfinite(tensor).all(1)
        if bad_T.any():
            return Fault(kind, int(bad_T.nonzero()[0]))
    return _repeated_id(tokens)


def _repeated_id(routed: RoutedTokens) -> Fault:
    """Rows of one expert are in order of token, so a repeated id makes two neighbours."""
    token_N = torch.div(routed.rows_N, routed.top_k, rounding_mode="floor")
    for expert_id, (start, end) in enumerate(routed.segments):
        tokens = token_N[start:end]
        same = tokens[1:] == tokens[:-1]
        if same.any():
            position = start + 1 + int(same.nonzero()[0])
            row = int(routed.rows_N[position])
            return Fault(_REPEATED_ID, *divmod(row, routed.top_k), expert_id)
    return Fault()


def _raise_fault(call: RelayCall, fault: Fault, rank: int) -> None:
    """Raise what ``fault`` on ``rank`` of the group means; nothing when it is none."""
    prefix, num_experts = _layer(call), call.shape.num_experts
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


_NUM_TOKENS = "x_TD's number of tokens T"
_SETTINGS = "the settings"
_FIELDS = (
    _NUM_TOKENS,
    "x_TD's dimension D",
    "the experts' dimension F",
    "the number of experts",
    "scores_TK's top-k",
    _SETTINGS,
)
_SETTINGS_BYTES = 4096


def check_across_ranks(call: RelayCall, num_tokens: int, fault: Fault) -> None:
    """Raise on every rank, naming ranks and values, when ranks differ or a rank has a fault."""
    every = _gather(call, [*_fingerprint(call, num_tokens), *fault])
    num_fields = len(_FIELDS)
    _check_none_refused(call, [Fault(*row[num_fields:]) for row in every])
    _check_equal(call, [row[:num_fields] for row in every])
    _check_num_tokens(call, [row[0] for row in every])
    for rank, row in enumerate(every):
        _raise_fault(call, Fault(*row[num_fields:]), rank)


def announce_refusal(ring: Ring) -> None:
    """Tell the others, in or on their way to that check, that this rank's call is refused."""
    ring.control.gather([0] * len(_FIELDS) + [*REFUSED])


def gather_counts(call: RelayCall, counts: torch.Tensor) -> list[list[list[int]]]:
    """Every rank's S x E counts of tokens per slice and expert."""
    num_experts = call.shape.num_experts
    matrix = counts_matrix(counts, num_experts)
    flat = [count for row in matrix for count in row]
    return [
        [row[start : start + num_experts] for start in range(0, len(row), num_experts)]
        for row in _gather(call, flat)
    ]


def _fingerprint(call: RelayCall, num_tokens: int) -> list[int]:
    shape = call.shape
    return [
        num_tokens,
        shape.dim,
        shape.expert_dim,
        shape.num_experts,
        shape.top_k,
        zlib.crc32(json.dumps(_settings(call)).encode()),
    ]


def _settings(call: RelayCall) -> dict[str, Any]:
    """What is no number, by name."""
    options = json.loads(call.options.spec)
    return {
        "x_TD's dtype": str(call.shape.dtype),
        "scores_TK's dtype": str(call.shape.score_dtype),
        "the presence of biases": call.shape.has_biases,
        "the activation": str(call.activation),
        **{f"RelayOptions.{name}": value for name, value in options.items()},
    }


def _gather(call: RelayCall, numbers: list[int]) -> list[list[int]]:
    if call.ring is None:
        return [numbers]
    try:
        return call.ring.control.gather(numbers)
    except RuntimeError as error:
        raise RingError(
            f"{_layer(call)}ring rank {call.rank} of {call.num_ranks}: not every rank reached the "
            f"{call.operation}: {error}"
        ) from error


def _check_equal(call: RelayCall, every: list[list[int]]) -> None:
    for index, name in enumerate(_FIELDS):
        values: list[Any] = [row[index] for row in every]
        if len(set(values)) == 1:
            continue
        fix = ""
        if name == _SETTINGS:
            name, values = _differing_setting(call)
        if name == _NUM_TOKENS:
            if call.options.max_tokens_per_rank is not None:
                continue
            fix = "; RelayOptions.max_tokens_per_rank allows different numbers"
        raise RelayUsageError(
            f"{_layer(call)}{name} must be equal on all ranks of the expert-parallel group; "
            f"by rank: {values}{fix}"
        )


def _check_none_refused(call: RelayCall, faults: list[Fault]) -> None:
    refused = [rank for rank, fault in enumerate(faults) if fault == REFUSED]
    if refused:
        raise RelayUsageError(
            f"{_layer(call)}inputs of the expert-parallel group's ranks {refused} were refused; "
            "their errors say why"
        )


def _differing_setting(call: RelayCall) -> tuple[str, list[Any]]:
    """The first setting that differs, and its value on every rank; all ranks call together."""
    mine = json.dumps(_settings(call)).encode()[:_SETTINGS_BYTES]
    every = [
        json.loads(bytes(row).rstrip(b"\0"))
        for row in _gather(call, [*mine.ljust(_SETTINGS_BYTES, b"\0")])
    ]
    name = next(name for name in every[0] if len({row[name] for row in every}) > 1)
    return name, [row[name] for row in every]


def _check_num_tokens(call: RelayCall, by_rank: list[int]) -> None:
    most = call.options.max_tokens_per_rank
    if most is not None and max(by_rank) > most:
        raise RelayUsageError(
            f"{_layer(call)}RelayOptions.max_tokens_per_rank = {most} is less than the number of "
            f"tokens of a rank of the expert-parallel group; by rank: {by_rank}"
        )


def _layer(call: RelayCall) -> str:
    return f"layer {call.options.layer!r}: " if call.options.layer else ""
