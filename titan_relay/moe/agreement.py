"""Before a forward moves anything: do all ranks mean the same call?

Ranks decide alike without talking because everything they decide from is the same on every rank.
If it is not, message sizes differ, and a transport then hangs or aborts. So each forward compares a
few host-side numbers over the ring's control group, once, and a difference is the same error on
every rank. The same message carries a rank's routing faults, so that all ranks stop, not one.
"""

import zlib

import torch
import torch.distributed as dist

from titan_relay.moe.call import RelayCall
from titan_relay.moe.errors import RelayUsageError, RingError
from titan_relay.moe.routing import NO_FAULT, counts_matrix, fault_of

_NUM_TOKENS = "x_TD's number of tokens T"
_FIELDS = (
    _NUM_TOKENS,
    "x_TD's dimension D",
    "w1_eFD's expert dimension F",
    "the number of experts",
    "scores_TK's top-k",
    "the dtype",
    "the options, the activation, the presence of biases or the scores' dtype",
)


def agree(call: RelayCall, num_tokens: int, counts: torch.Tensor) -> None:
    """Raise on every rank, naming ranks and values, when ranks differ or a rank saw a fault."""
    faults = [fault_of(counts)]
    if call.ring is not None and call.ring.control is not None:
        every = _gather(call, [*_fingerprint(call, num_tokens), *faults[0]])
        _check_equal(call, [row[: len(_FIELDS)] for row in every])
        _check_num_tokens(call, [row[0] for row in every])
        faults = [(row[-2], row[-1]) for row in every]
    else:
        _check_num_tokens(call, [num_tokens])
    for rank, (row, expert_id) in enumerate(faults):
        if row != NO_FAULT:
            token, choice = divmod(row, call.shape.top_k)
            raise RelayUsageError(
                f"{_layer(call)}expert_ids_TK[{token}, {choice}] = {expert_id} on rank {rank} of "
                f"the expert-parallel group; ids must be in [0, {call.shape.num_experts})"
            )


def _fingerprint(call: RelayCall, num_tokens: int) -> list[int]:
    shape = call.shape
    described = f"{call.options.spec} {call.activation} {shape.has_biases} {shape.score_dtype}"
    return [
        num_tokens,
        shape.dim,
        shape.expert_dim,
        shape.num_experts,
        shape.top_k,
        zlib.crc32(str(shape.dtype).encode()),
        zlib.crc32(described.encode()),
    ]


def gather_counts(call: RelayCall, counts: torch.Tensor) -> list[list[list[int]]]:
    """Every rank's S x E counts."""
    num_experts = call.shape.num_experts
    if call.ring is None:
        return [counts_matrix(counts, num_experts)]
    return [
        counts_matrix(torch.tensor(row, dtype=torch.int64), num_experts)
        for row in _gather(call, counts.tolist())
    ]


def _gather(call: RelayCall, numbers: list[int]) -> list[list[int]]:
    assert call.ring is not None
    mine = torch.tensor(numbers, dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(call.num_ranks)]
    try:
        dist.all_gather(every, mine, group=call.ring.control)
    except RuntimeError as error:
        raise RingError(
            f"{_layer(call)}ring rank {call.ring.link.rank} of {call.num_ranks}: the ranks did "
            f"not all reach the {call.operation}: {error}"
        ) from error
    return [row.tolist() for row in every]


def _check_equal(call: RelayCall, every: list[list[int]]) -> None:
    for index, name in enumerate(_FIELDS):
        values = [row[index] for row in every]
        if len(set(values)) == 1:
            continue
        fix = ""
        if name == _NUM_TOKENS:
            if call.options.max_tokens_per_rank is not None:
                continue
            fix = "; RelayOptions.max_tokens_per_rank allows different numbers"
        raise RelayUsageError(
            f"{_layer(call)}{name} must be equal on all ranks of the expert-parallel group; "
            f"by rank: {values}{fix}"
        )


def _check_num_tokens(call: RelayCall, by_rank: list[int]) -> None:
    most = call.options.max_tokens_per_rank
    if most is not None and max(by_rank) > most:
        raise RelayUsageError(
            f"{_layer(call)}RelayOptions.max_tokens_per_rank = {most} is less than the number of "
            f"tokens of a rank of the expert-parallel group; by rank: {by_rank}"
        )


def _layer(call: RelayCall) -> str:
    return f"layer {call.options.layer!r}: " if call.options.layer else ""
