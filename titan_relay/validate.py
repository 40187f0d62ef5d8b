"""The one door of every configuration that is to run, be planned, counted or converted.

First what needs numbers and file names only, so that a mistake shows within a moment; then the
data, for which numpy is imported, and whether the model's family has the keys that are given, for
which torchtitan is: seconds, which a right configuration spends anyway.
"""

from __future__ import annotations

from titan_relay.config import RunConfig, Sources, check_keys, check_model


def validate(
    config: RunConfig, world_size: int, sources: Sources | str, *, files: bool = True
) -> None:
    """Raise `ConfigError`, naming file, key, value and what would be right, or return.

    Every rank comes to the same answer, without a process group.

    Args:
        world_size: ranks of the whole run.
        sources: `Loaded.sources`, or a name to put in the place of the file.
        files: also look whether data, tokenizer and initial checkpoint exist; False to check a
            configuration for another machine.
    """
    if isinstance(sources, str):
        sources = Sources(sources)
    check_keys(config, world_size, sources, files=files)
    _check_data(config, sources, files=files)
    _check_family(config, sources)


def validate_model(config: RunConfig, sources: Sources) -> None:
    """`validate` for [model] alone, where nothing is trained."""
    check_model(config, sources)
    _check_family(config, sources)


def _check_data(config: RunConfig, sources: Sources, *, files: bool) -> None:
    from titan_relay.data.check import check_data

    check_data(config, sources, files=files)


def _check_family(config: RunConfig, sources: Sources) -> None:
    from titan_relay.titan.model.families import check_family

    check_family(config, sources)
