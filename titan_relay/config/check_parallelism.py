"""Do the parallel degrees fit the ranks, the model, the sequence and the batch?"""

import math
from collections.abc import Iterator, Mapping

from titan_relay.config.degrees import (
    Degrees,
    degrees_of,
    divisors,
    microbatch_tokens,
    multiples_near,
    nearest_few,
    sequence_multiple,
)
from titan_relay.config.errors import Origins, Refusal, either
from titan_relay.config.schema import RunConfig

_AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
# Schedules for so many stages per rank, no more; the others take two or more.
_STAGES_PER_RANK = {"1F1B": 1, "GPipe": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}

# A rank's two stages are the first and the last: torch 2.13 runs them with a backward only.
_TRAINING_ONLY = ("ZBVZeroBubble", "DualPipeV")
# These go backward twice through a stage, once for its input and once for its weights: torch's
# checkpoints and compiled graphs go backward once.
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def check_parallelism(config: RunConfig, world_size: int, origins: Origins) -> None:
    """Raise `ConfigError` for degrees that cannot be laid out."""
    degrees = degrees_of(config, world_size)
    origins.refuse(
        config,
        _check_world(config, degrees, world_size),
        _check_experts(config, degrees),
        _check_heads(config, degrees),
        _check_sequence(config, degrees),
        _check_batch(config, degrees),
        _check_loss_chunks(config, degrees),
        _check_relay_tokens(config, degrees),
        _check_pipeline(config),
        _check_pairs(config, degrees),
    )


def _check_world(config: RunConfig, degrees: Degrees, world_size: int) -> Iterator[Refusal]:
    if degrees.world == world_size:
        return
    if config.parallelism.data_parallel_shard_degree == -1:
        yield from _refuse_left_over(degrees, world_size)
    others = degrees.world // degrees.dp_shard
    fixes = [f"start {degrees.world} ranks"]
    if world_size % others == 0:
        fixes.insert(0, f"use {world_size // others} (or -1)")
    there_are = f"there are {world_size} ranks" if world_size > 1 else "there is 1 rank"
    yield Refusal(
        "parallelism.data_parallel_shard_degree",
        f"{_product({axis: getattr(degrees, axis) for axis in _AXES})} = {degrees.world}, but "
        f"{there_are}; {', or '.join(fixes)}{_expert_hint(degrees, world_size)}",
    )


def _refuse_left_over(degrees: Degrees, world_size: int) -> Iterator[Refusal]:
    """The shard degree is -1 and the other degrees do not divide the ranks."""
    sizes = {axis: getattr(degrees, axis) for axis in _AXES if axis != "dp_shard"}
    others = math.prod(sizes.values())
    culprit = next((axis for axis, size in sizes.items() if world_size % size), None)
    culprit = culprit or max(sizes, key=lambda axis: sizes[axis])
    legal = [
        each for each in divisors(world_size) if world_size % (others // sizes[culprit] * each) == 0
    ]
    fixes = [f"use {either(nearest_few(sizes[culprit], legal))}"] if legal else []
    fixes.append(f"start a multiple of {others} ranks")
    yield Refusal(
        f"parallelism.{_AXES[culprit]}",
        f"{_product(sizes)} = {others} does not divide the {world_size} ranks; "
        f"{', or '.join(fixes)}{_expert_hint(degrees, world_size)}",
    )


def _product(sizes: Mapping[str, int]) -> str:
    return " * ".join(f"{axis} {size}" for axis, size in sizes.items())


def _expert_hint(degrees: Degrees, world_size: int) -> str:
    if degrees.ep > 1 and degrees.world * degrees.ep == world_size:
        return f" (expert_parallel_degree {degrees.ep} is no factor: it reuses these ranks)"
    return ""


def _check_experts(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    ep, region, experts = degrees.ep, degrees.expert_region, config.model.moe.num_experts
    key = "parallelism.expert_parallel_degree"
    legal = either(nearest_few(ep, divisors(math.gcd(region, experts))))
    if region % ep:
        yield Refusal(
            key,
            f"must divide dp_shard * cp * tp = {degrees.dp_shard} * {degrees.cp} * {degrees.tp} "
            f"= {region} and model.moe.num_experts = {experts}; use {legal}",
        )
    if experts % ep:
        more = either(multiples_near(experts, ep))
        yield Refusal(
            key, f"must divide model.moe.num_experts = {experts}; use {legal}, or {more} experts"
        )


def _check_heads(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    model, tp = config.model, degrees.tp
    shared = math.gcd(model.num_heads, model.num_kv_heads)
    if shared % tp:
        kv = f" and model.num_kv_heads = {model.num_kv_heads}" if model.num_kv_heads else ""
        yield Refusal(
            "parallelism.tensor_parallel_degree",
            f"must divide model.num_heads = {model.num_heads}{kv}; "
            f"use {either(nearest_few(tp, divisors(shared)))}",
        )


def _check_sequence(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    seq_len, longest = config.training.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield Refusal(
            "training.seq_len",
            f"must be at most model.max_seq_len = {longest}; use {longest} or less, or raise it",
        )
    if degrees.cp > 1 and config.model.attention_backend == "varlen":
        yield Refusal(
            "model.attention_backend",
            f"cannot be split over context_parallel_degree = {degrees.cp} ranks; "
            'use "flex", or context_parallel_degree = 1',
        )
    unit, reason = sequence_multiple(config, degrees)
    if seq_len % unit:
        yield Refusal(
            "training.seq_len",
            f"must be a multiple of {reason}; use {either(multiples_near(seq_len, unit))}",
        )


def _check_batch(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    total, local = config.training.global_batch_size, config.training.local_batch_size
    unit = local * degrees.batch
    if total != -1 and total % unit:
        yield Refusal(
            "training.global_batch_size",
            f"must be a multiple of local_batch_size * dp_replicate * dp_shard = {local} * "
            f"{degrees.dp_replicate} * {degrees.dp_shard} = {unit}; "
            f"use {either(multiples_near(total, unit))}",
        )


def _check_loss_chunks(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    if config.loss.name != "chunked_cross_entropy" or config.loss.num_chunks == "auto":
        return
    local_len = config.training.seq_len // degrees.cp
    if local_len % config.loss.num_chunks:
        legal = nearest_few(config.loss.num_chunks, divisors(local_len), 2)
        yield Refusal(
            "loss.num_chunks",
            f"must divide seq_len / cp = {config.training.seq_len} / {degrees.cp} = {local_len}; "
            f"use {either(legal)}",
        )


def _check_relay_tokens(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    most, tokens = config.relay.max_tokens_per_rank, microbatch_tokens(config, degrees)
    if most is not None and most < tokens:
        yield Refusal(
            "relay.max_tokens_per_rank",
            f"must be at least the tokens of a microbatch on a rank, {tokens}; "
            "use that, or leave it out",
        )


def _check_pairs(config: RunConfig, degrees: Degrees) -> Iterator[Refusal]:
    """Features that each work, and not together; torch would hang or end in a traceback."""
    asked, tp = config.parallelism, degrees.tp
    schedule = asked.pipeline_parallel_schedule if degrees.pp > 1 else ""
    scheduled = f'parallelism.pipeline_parallel_schedule = "{schedule}"'
    compiles = config.compile.enable and "model" in config.compile.components
    recomputes = config.activation_checkpoint.mode != "none"
    splits_experts = tp > 1 and degrees.ep > 1 and not asked.enable_sequence_parallel
    for broken, key, fix in (
        (
            schedule in _TRAINING_ONLY and config.validator.enable,
            "validator.enable",
            f"{scheduled} cannot validate; use false, or another schedule",
        ),
        (
            tp > 1 and compiles,
            "compile.components",
            f"the model cannot be compiled with parallelism.tensor_parallel_degree = {tp}; "
            'use ["loss"], or compile.enable = false',
        ),
        (
            schedule in _SPLIT_BACKWARD and config.compile.enable,
            "compile.enable",
            f"nothing can be compiled with {scheduled}, which splits the backward; use false, or "
            "another schedule",
        ),
        (
            schedule in _SPLIT_BACKWARD and recomputes,
            "activation_checkpoint.mode",
            f"nothing can be computed again with {scheduled}, which splits the backward; "
            'use "none", another schedule, or relay.dispatcher = "relay"',
        ),
        (
            splits_experts,
            "parallelism.enable_sequence_parallel",
            f"experts cannot be split (parallelism.expert_parallel_degree = {degrees.ep}) over "
            f"whole sequences of parallelism.tensor_parallel_degree = {tp} ranks; use true",
        ),
    ):
        if broken:
            yield Refusal(key, fix)


def _check_pipeline(config: RunConfig) -> Iterator[Refusal]:
    """The layers and the batch can be split over pipeline stages, if there are any.

    The rules are those of torchtitan 0.3's stage split (``_get_pipeline_metadata`` and
    ``_generate_llm_fqn_per_model_part``) and of torch's schedules, said before anything is built.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    if config.model.tie_word_embeddings:
        yield Refusal(
            "model.tie_word_embeddings",
            "embedding and output head are on different pipeline stages; use false, or "
            "parallelism.pipeline_parallel_degree = 1",
        )
    batch = config.training.local_batch_size
    size = config.parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        legal = nearest_few(size, divisors(batch))
        yield Refusal(
            "parallelism.pipeline_parallel_microbatch_size",
            f"must divide training.local_batch_size = {batch}; use {either(legal)}",
        )
    yield from _check_stages(config)


def _check_stages(config: RunConfig) -> Iterator[Refusal]:
    """The schedule can run the stages that were asked for, each with enough layers."""
    asked = config.parallelism
    degree, schedule = asked.pipeline_parallel_degree, asked.pipeline_parallel_schedule
    if asked.module_fqns_per_model_part is not None:
        stages = len(asked.module_fqns_per_model_part)
        if not _fits(stages, degree, schedule):
            yield Refusal(
                "parallelism.module_fqns_per_model_part",
                f"{_refusal(stages, degree, schedule)}; give {_wanted(degree, schedule)} lists",
            )
        yield from _check_modules(config, asked.module_fqns_per_model_part)
        return
    stages = degree * _STAGES_PER_RANK.get(schedule, 2)
    layers_per_stage = asked.pipeline_parallel_layers_per_stage
    if layers_per_stage is not None:
        stages = _stages_of_layers(config, layers_per_stage)
        yield from _check_layers_per_stage(config, layers_per_stage, stages)
    yield from _check_layers(config, stages)


def _check_modules(config: RunConfig, parts: tuple[tuple[str, ...], ...]) -> Iterator[Refusal]:
    """Every module of the model is in one stage, in the model's order."""
    layers = [f"layers.{index}" for index in range(config.model.num_layers)]
    wanted = ["tok_embeddings", *layers, "norm", "lm_head"]
    given = [name for part in parts for name in part]
    if given == wanted:
        return
    unknown = [name for name in given if name not in wanted]
    missing = [name for name in wanted if name not in given]
    fault = "names modules twice or out of order"
    if missing:
        fault = f"leaves out {missing[0]}"
    if unknown:
        fault = f"names {unknown[0]}, which the model does not have"
    yield Refusal(
        "parallelism.module_fqns_per_model_part",
        f"{fault}; spread tok_embeddings, layers.0 to {layers[-1]}, norm, lm_head over the lists, "
        "in this order",
    )


def _fits(stages: int, degree: int, schedule: str) -> bool:
    per_rank, rest = divmod(stages, degree)
    exactly = _STAGES_PER_RANK.get(schedule)
    return not rest and (per_rank >= 2 if exactly is None else per_rank == exactly)


def _wanted(degree: int, schedule: str) -> str:
    exactly = _STAGES_PER_RANK.get(schedule)
    return f"{2 * degree} or {3 * degree} or more" if exactly is None else f"{exactly * degree}"


def _refusal(stages: int, degree: int, schedule: str) -> str:
    needs = _STAGES_PER_RANK.get(schedule, "2 or more")
    return f"is {stages} stages for {degree} ranks, but {schedule} needs {needs} per rank"


def _stages_of_layers(config: RunConfig, layers_per_stage: int) -> int:
    return -(-_weighted_layers(config) // layers_per_stage)


def _weighted_layers(config: RunConfig) -> int:
    """Layers, with the embedding and the head counted as the layers that they replace."""
    asked = config.parallelism
    return (
        config.model.num_layers
        + asked.pipeline_parallel_first_stage_less_layers
        + asked.pipeline_parallel_last_stage_less_layers
    )


def _check_layers_per_stage(config: RunConfig, value: int, stages: int) -> Iterator[Refusal]:
    asked = config.parallelism
    degree, schedule = asked.pipeline_parallel_degree, asked.pipeline_parallel_schedule
    if _fits(stages, degree, schedule):
        return
    legal = [
        each
        for each in range(1, _weighted_layers(config) + 1)
        if _fits(_stages_of_layers(config, each), degree, schedule)
    ]
    near = nearest_few(value, legal, 2)
    yield Refusal(
        "parallelism.pipeline_parallel_layers_per_stage",
        f"{_refusal(stages, degree, schedule)}; use {either([*near, 'none'])}",
    )


def _check_layers(config: RunConfig, stages: int) -> Iterator[Refusal]:
    asked, layers = config.parallelism, config.model.num_layers
    first = asked.pipeline_parallel_first_stage_less_layers
    last = asked.pipeline_parallel_last_stage_less_layers
    per_stage = _weighted_layers(config) // stages
    if per_stage == 0:
        yield Refusal(
            "model.num_layers",
            f"is too few for {stages} pipeline stages (degree {asked.pipeline_parallel_degree}, "
            f"schedule {asked.pipeline_parallel_schedule}); use {stages - first - last} or more, "
            "or a lower parallelism.pipeline_parallel_degree",
        )
    for which, less in (("first", first), ("last", last)):
        if less > per_stage:
            rest = layers + first + last - less
            most = max(each for each in range(less) if each <= (rest + each) // stages)
            yield Refusal(
                f"parallelism.pipeline_parallel_{which}_stage_less_layers",
                f"must be at most the layers of a stage, ({layers} + {first} + {last}) / {stages} "
                f"= {per_stage}; use {most} or less",
            )
