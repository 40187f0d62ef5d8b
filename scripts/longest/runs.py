"""The run of a script about lengths or budgets, checked for every variant before it starts."""

from titan_relay.config import RunConfig, load_config
from titan_relay.titan.plan.longest import with_length
from titan_relay.titan.plan.variants import variant_of
from titan_relay.validate import validate


def checked_run(
    config: str, keys: list[str], variants: list[str], world_size: int, seq_len: int | None = None
) -> RunConfig:
    """The configuration, which every variant can run; with `seq_len` as one sequence so long.

    Raises `ValueError` with one line that names the key, its value and its place.
    """
    loaded = load_config(["--config", config, *keys])
    run, sources = loaded.config, loaded.sources
    stages = run.parallelism.pipeline_parallel_degree
    if stages > 1:
        raise sources.error(
            "parallelism.pipeline_parallel_degree",
            stages,
            "must be 1 here: one sequence at a time makes no microbatches for a pipeline",
        )
    for name in variants:
        variant = variant_of(run, name)
        validate(variant, world_size, sources, files=False)
        if seq_len is not None:
            validate(with_length(variant, seq_len), world_size, sources, files=False)
    return run
