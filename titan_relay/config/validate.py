"""Whether the keys of a configuration go together on a given number of ranks, whatever the family.

Each value by itself is already right when a `RunConfig` comes from `load_config`; what is left are
the rules between keys. Runs on every rank before any process group exists, from numbers and file
names only, so that all ranks come to the same answer.
"""

from titan_relay.config.check_data import check_data
from titan_relay.config.check_model import check_model
from titan_relay.config.check_parallelism import check_parallelism
from titan_relay.config.check_pipeline import check_pipeline
from titan_relay.config.check_run import (
    check_checkpoint_keys,
    check_debug,
    check_profiler,
    check_recompute,
    check_reporting,
    check_schedule,
)
from titan_relay.config.schema import RunConfig
from titan_relay.config.settings import Sources


def check_keys(
    config: RunConfig, world_size: int, sources: Sources | str, *, files: bool = True
) -> None:
    """Raise `ConfigError`, naming file, key, value and what would be right, or return.

    world_size: ranks of the whole run.
    sources: `Loaded.sources`, or a name to put in the place of the file.
    files: also look whether data, tokenizer and initial checkpoint exist; False to check a
        configuration for another machine.
    """
    if isinstance(sources, str):
        sources = Sources(sources)
    check_model(config, sources)
    check_parallelism(config, world_size, sources)
    check_pipeline(config, sources)
    check_schedule(config, sources)
    check_recompute(config, sources)
    check_debug(config, sources)
    check_profiler(config, sources)
    check_checkpoint_keys(config, sources, files=files)
    check_reporting(config, sources)
    check_data(config, sources, files=files)
