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
    stages = _num_stages(config, sources)
    if config.parallelism.module_fqns_per_model_part is None:
        _check_layers(config, stages, sources)


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


def _num_stages(config: RunConfig, sources: Sources) -> int:
    """Stages over all ranks; raises where the schedule cannot run that many per rank."""
    asked, layers = config.parallelism, config.model.num_layers
    degree, schedule = asked.pipeline_parallel_degree, asked.pipeline_parallel_schedule
    key: str
    value: object
    if asked.module_fqns_per_model_part is not None:
        key, value = "module_fqns_per_model_part", asked.module_fqns_per_model_part
        stages = len(asked.module_fqns_per_model_part)
    elif asked.pipeline_parallel_layers_per_stage is not None:
        key, value = "pipeline_parallel_layers_per_stage", asked.pipeline_parallel_layers_per_stage
        weight = layers + asked.pipeline_parallel_first_stage_less_layers
        weight += asked.pipeline_parallel_last_stage_less_layers
        stages = -(-weight // asked.pipeline_parallel_layers_per_stage)
    else:
        return degree * (1 if schedule in _SINGLE_STAGE else 2)
    per_rank, rest = divmod(stages, degree)
    wanted = "exactly 1" if schedule in _SINGLE_STAGE else "at least 2"
    wanted = "exactly 2" if schedule in _TWO_STAGES else wanted
    fits = {"exactly 1": per_rank == 1, "exactly 2": per_rank == 2, "at least 2": per_rank >= 2}
    if rest or not fits[wanted]:
        count = 2 * degree if wanted != "exactly 1" else degree
        raise sources.error(
            f"parallelism.{key}",
            value,
            f"gives {stages} stages for {degree} ranks, but {schedule} needs {wanted} per rank; "
            f"make it {count} stages" + (" (or a multiple)" if wanted == "at least 2" else ""),
        )
    return stages


def _check_layers(config: RunConfig, stages: int, sources: Sources) -> None:
    asked, layers = config.parallelism, config.model.num_layers
    first = asked.pipeline_parallel_first_stage_less_layers
    last = asked.pipeline_parallel_last_stage_less_layers
    per_stage = (layers + first + last) // stages
    if per_stage == 0 or layers < stages - (first > 0) - (last > 0):
        raise sources.error(
            "model.num_layers",
            layers,
            f"is too few for {stages} pipeline stages (degree {asked.pipeline_parallel_degree}, "
            f"schedule {asked.pipeline_parallel_schedule}); use {stages} or more, or a lower "
            "parallelism.pipeline_parallel_degree",
        )
    for which, less in (("first", first), ("last", last)):
        if less > per_stage:
            raise sources.error(
                f"parallelism.pipeline_parallel_{which}_stage_less_layers",
                less,
                f"must be at most the layers of a stage, ({layers} + {first} + {last}) / {stages} "
                f"= {per_stage}",
            )
