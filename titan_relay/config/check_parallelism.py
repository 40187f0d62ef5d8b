"""Do the parallel degrees fit the ranks, the model, the sequence and the batch?"""

import math

from titan_relay.config.degrees import (
    Degrees,
    degrees_of,
    divisors,
    microbatch_tokens,
    multiples_near,
    nearest_few,
    sequence_multiple,
)
from titan_relay.config.expectation import either
from titan_relay.config.schema import RunConfig
from titan_relay.config.schema_model import LossConfig
from titan_relay.config.settings import Sources

_AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def check_parallelism(config: RunConfig, world_size: int, sources: Sources) -> None:
    """Raise `ConfigError` for degrees that cannot be laid out."""
    degrees = degrees_of(config, world_size)
    _check_world(config, degrees, world_size, sources)
    _check_experts(config, degrees, sources)
    _check_heads(config, degrees, sources)
    _check_sequence(config, degrees, sources)
    _check_batch(config, degrees, sources)
    _check_loss_chunks(config, degrees, sources)
    _check_relay_tokens(config, degrees, sources)


def numbers(values: list[int]) -> str:
    """``1, 2 or 4``."""
    return either([str(value) for value in values])


def _check_world(config: RunConfig, degrees: Degrees, world_size: int, sources: Sources) -> None:
    if degrees.world == world_size:
        return
    if config.parallelism.data_parallel_shard_degree == -1:
        _refuse_left_over(degrees, world_size, sources)
    others = degrees.world // degrees.dp_shard
    fixes = [f"start {degrees.world} ranks"]
    if world_size % others == 0:
        fixes.insert(0, f"use {world_size // others} (or -1)")
    raise sources.error(
        "parallelism.data_parallel_shard_degree",
        degrees.dp_shard,
        f"{_product(degrees)} = {degrees.world}, but there {_are(world_size)}; "
        f"{', or '.join(fixes)}{_expert_hint(degrees, world_size)}",
    )


def _are(num_ranks: int) -> str:
    return f"are {num_ranks} ranks" if num_ranks > 1 else "is 1 rank"


def _refuse_left_over(degrees: Degrees, world_size: int, sources: Sources) -> None:
    """The shard degree is -1 and the other degrees do not divide the ranks."""
    sizes = {axis: getattr(degrees, axis) for axis in _AXES if axis != "dp_shard"}
    others = math.prod(sizes.values())
    culprit = next((axis for axis, size in sizes.items() if world_size % size), None)
    culprit = culprit or max(sizes, key=lambda axis: sizes[axis])
    legal = [
        each for each in divisors(world_size) if world_size % (others // sizes[culprit] * each) == 0
    ]
    fixes = [f"use {numbers(nearest_few(sizes[culprit], legal))}"] if legal else []
    fixes.append(f"start a multiple of {others} ranks")
    words = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise sources.error(
        f"parallelism.{_AXES[culprit]}",
        sizes[culprit],
        f"{words} = {others} does not divide the {world_size} ranks; "
        f"{', or '.join(fixes)}{_expert_hint(degrees, world_size)}",
    )


def _product(degrees: Degrees) -> str:
    return " * ".join(f"{axis} {getattr(degrees, axis)}" for axis in _AXES)


def _expert_hint(degrees: Degrees, world_size: int) -> str:
    if degrees.ep > 1 and degrees.world * degrees.ep == world_size:
        return f" (expert_parallel_degree {degrees.ep} is no factor: it reuses these ranks)"
    return ""


def _check_experts(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    ep, region, experts = degrees.ep, degrees.expert_region, config.model.moe.num_experts
    key = "parallelism.expert_parallel_degree"
    legal = numbers(nearest_few(ep, divisors(math.gcd(region, experts))))
    if region % ep:
        raise sources.error(
            key,
            ep,
            f"must divide dp_shard * cp * tp = {degrees.dp_shard} * {degrees.cp} * {degrees.tp} "
            f"= {region} and model.moe.num_experts = {experts}; use {legal}",
        )
    if experts % ep:
        more = numbers(multiples_near(experts, ep))
        raise sources.error(
            key,
            ep,
            f"must divide model.moe.num_experts = {experts}; use {legal}, or {more} experts",
        )


def _check_heads(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    model, tp = config.model, degrees.tp
    shared = math.gcd(model.num_heads, model.num_kv_heads)
    if shared % tp:
        kv = f" and model.num_kv_heads = {model.num_kv_heads}" if model.num_kv_heads else ""
        raise sources.error(
            "parallelism.tensor_parallel_degree",
            tp,
            f"must divide model.num_heads = {model.num_heads}{kv}; "
            f"use {numbers(nearest_few(tp, divisors(shared)))}",
        )


def _check_sequence(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    seq_len, longest = config.training.seq_len, config.model.max_seq_len
    if seq_len > longest:
        raise sources.error(
            "training.seq_len",
            seq_len,
            f"must be at most model.max_seq_len = {longest}; use {longest} or less, or raise it",
        )
    if degrees.cp > 1 and config.model.attention_backend == "varlen":
        raise sources.error(
            "model.attention_backend",
            "varlen",
            f"cannot be split over context_parallel_degree = {degrees.cp} ranks; "
            'use "flex", or context_parallel_degree = 1',
        )
    unit, reason = sequence_multiple(config, degrees)
    if seq_len % unit:
        raise sources.error(
            "training.seq_len",
            seq_len,
            f"must be a multiple of {reason}; use {numbers(multiples_near(seq_len, unit))}",
        )


def _check_batch(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    total, local = config.training.global_batch_size, config.training.local_batch_size
    unit = local * degrees.batch
    if total != -1 and total % unit:
        raise sources.error(
            "training.global_batch_size",
            total,
            f"must be a multiple of local_batch_size * dp_replicate * dp_shard = {local} * "
            f"{degrees.dp_replicate} * {degrees.dp_shard} = {unit}; "
            f"use {numbers(multiples_near(total, unit))}",
        )


def _check_loss_chunks(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    defaults = LossConfig()
    chunked = config.loss.name == "chunked_cross_entropy"
    for key, value, used, needs in (
        ("num_chunks", config.loss.num_chunks, chunked, 'name = "chunked_cross_entropy"'),
        (
            "max_chunk_mib",
            config.loss.max_chunk_mib,
            chunked and config.loss.num_chunks == "auto",
            'name = "chunked_cross_entropy" and num_chunks = "auto"',
        ),
    ):
        if not used and value != getattr(defaults, key):
            raise sources.error(f"loss.{key}", value, f"needs loss.{needs}; leave it out")
    if not chunked or config.loss.num_chunks == "auto":
        return
    local_len = config.training.seq_len // degrees.cp
    if local_len % config.loss.num_chunks:
        legal = nearest_few(config.loss.num_chunks, divisors(local_len), 2)
        raise sources.error(
            "loss.num_chunks",
            config.loss.num_chunks,
            f"must divide seq_len / cp = {config.training.seq_len} / {degrees.cp} = {local_len}; "
            f"use {numbers(legal)}",
        )


def _check_relay_tokens(config: RunConfig, degrees: Degrees, sources: Sources) -> None:
    most, tokens = config.relay.max_tokens_per_rank, microbatch_tokens(config, degrees)
    if most is not None and most < tokens:
        raise sources.error(
            "relay.max_tokens_per_rank",
            most,
            f"must be at least the tokens of a microbatch on a rank, {tokens}; "
            "use that, or leave it out",
        )
