"""Can the layers and the batch be split for pipeline parallelism?

The rules are those of torchtitan 0.3's stage split (``_get_pipeline_metadata`` and
``_generate_llm_fqn_per_model_part``) and of torch's schedules, said before anything is built.
"""

from titan_relay.config.degrees import divisors, nearest_few
from titan_relay.config.expectation import either
from titan_relay.config.schema import RunConfig
from titan_relay.config.settings import Sources

_SINGLE_STAGE = ("1F1B", "GPipe")
_TWO_STAGES = ("ZBVZeroBubble", "DualPipeV")


def check_pipeline(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a pipeline that cannot be built; nothing to do without one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    if config.model.tie_word_embeddings:
        raise sources.error(
            "model.tie_word_embeddings",
            True,
            "embedding and output head are on different pipeline stages; use false, or "
            "parallelism.pipeline_parallel_degree = 1",
        )
    _check_microbatches(config, sources)
    _check_stages(config, sources)


def _check_microbatches(config: RunConfig, sources: Sources) -> None:
    size, batch = (
        config.parallelism.pipeline_parallel_microbatch_size,
        config.training.local_batch_size,
    )
    if batch % size:
        legal = [str(each) for each in nearest_few(size, divisors(batch))]
        raise sources.error(
            "parallelism.pipeline_parallel_microbatch_size",
            size,
            f"must divide training.local_batch_size = {batch}; use {either(legal)}",
        )


def _check_stages(config: RunConfig, sources: Sources) -> None:
    """The schedule can run the stages that were asked for, each with enough layers."""
    asked = config.parallelism
    degree, schedule = asked.pipeline_parallel_degree, asked.pipeline_parallel_schedule
    if asked.module_fqns_per_model_part is not None:
        stages = len(asked.module_fqns_per_model_part)
        if not _fits(stages, degree, schedule):
            raise sources.error(
                "parallelism.module_fqns_per_model_part",
                asked.module_fqns_per_model_part,
                f"{_refusal(stages, degree, schedule)}; give {_wanted(degree, schedule)} lists",
            )
        _check_modules(config, asked.module_fqns_per_model_part, sources)
        return
    stages = degree * (1 if schedule in _SINGLE_STAGE else 2)
    if asked.pipeline_parallel_layers_per_stage is not None:
        stages = _stages_of_layers(config, asked.pipeline_parallel_layers_per_stage)
        _check_layers_per_stage(config, stages, sources)
    _check_layers(config, stages, sources)


def _check_modules(config: RunConfig, parts: tuple[tuple[str, ...], ...], sources: Sources) -> None:
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
    raise sources.error(
        "parallelism.module_fqns_per_model_part",
        parts,
        f"{fault}; spread tok_embeddings, layers.0 to {layers[-1]}, norm, lm_head over the lists, "
        "in this order",
    )


def _fits(stages: int, degree: int, schedule: str) -> bool:
    per_rank, rest = divmod(stages, degree)
    if rest:
        return False
    if schedule in _SINGLE_STAGE:
        return per_rank == 1
    return per_rank == 2 if schedule in _TWO_STAGES else per_rank >= 2


def _wanted(degree: int, schedule: str) -> str:
    if schedule in _SINGLE_STAGE:
        return str(degree)
    return f"{2 * degree}" if schedule in _TWO_STAGES else f"{2 * degree} or {3 * degree} or more"


def _refusal(stages: int, degree: int, schedule: str) -> str:
    per_rank = {True: "1", False: "2" if schedule in _TWO_STAGES else "2 or more"}
    needs = per_rank[schedule in _SINGLE_STAGE]
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


def _check_layers_per_stage(config: RunConfig, stages: int, sources: Sources) -> None:
    asked = config.parallelism
    degree, schedule = asked.pipeline_parallel_degree, asked.pipeline_parallel_schedule
    value = asked.pipeline_parallel_layers_per_stage
    if value is None or _fits(stages, degree, schedule):
        return
    legal = [
        each
        for each in range(1, _weighted_layers(config) + 1)
        if _fits(_stages_of_layers(config, each), degree, schedule)
    ]
    near = [str(each) for each in nearest_few(value, legal, 2)]
    raise sources.error(
        "parallelism.pipeline_parallel_layers_per_stage",
        value,
        f"{_refusal(stages, degree, schedule)}; use {either([*near, 'none'])}",
    )


def _check_layers(config: RunConfig, stages: int, sources: Sources) -> None:
    asked, layers = config.parallelism, config.model.num_layers
    first = asked.pipeline_parallel_first_stage_less_layers
    last = asked.pipeline_parallel_last_stage_less_layers
    per_stage = _weighted_layers(config) // stages
    if per_stage == 0:
        raise sources.error(
            "model.num_layers",
            layers,
            f"is too few for {stages} pipeline stages (degree {asked.pipeline_parallel_degree}, "
            f"schedule {asked.pipeline_parallel_schedule}); use {stages - first - last} or more, "
            "or a lower parallelism.pipeline_parallel_degree",
        )
    for which, less in (("first", first), ("last", last)):
        if less > per_stage:
            rest = layers + first + last - less
            most = max(each for each in range(less) if each <= (rest + each) // stages)
            raise sources.error(
                f"parallelism.pipeline_parallel_{which}_stage_less_layers",
                less,
                f"must be at most the layers of a stage, ({layers} + {first} + {last}) / {stages} "
                f"= {per_stage}; use {most} or less",
            )
