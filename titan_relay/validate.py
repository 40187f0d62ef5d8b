"""The one door of every configuration that is to run, be planned, counted or converted.

First what needs numbers and file names only, so that a mistake shows within a moment; then the
data, for which numpy is imported, and whether the model's family has the keys that are given, for
which torchtitan is: seconds, which a right configuration spends anyway.
"""

from __future__ import annotations

from titan_relay.config import Origins, RunConfig, check_keys, check_model


def validate(
    config: RunConfig, world_size: int, origins: Origins | str, *, files: bool = True
) -> None:
    """Raise `ConfigError`, naming file, key, value and what would be right, or return.

    Every rank comes to the same answer, without a process group.

    Args:
        world_size: ranks of the whole run.
        origins: `Loaded.origins`, or a name to put in the place of the file.
        files: also look whether data, tokenizer and initial checkpoint exist; False to check a
            configuration for another machine.
    """
    if isinstance(origins, str):
        origins = Origins(origins)
    check_keys(config, world_size, origins, files=files)
    _check_data(config, origins, files=files)
    _check_family(config, origins)


def validate_model(config: RunConfig, origins: Origins) -> None:
    """`validate` for [model] alone, where nothing is trained."""
    check_model(config, origins)
    _check_family(config, origins)


def _check_data(config: RunConfig, origins: Origins, *, files: bool) -> None:
    from titan_relay.data.check import check_data

    check_data(config, origins, files=files)


def _check_family(config: RunConfig, origins: Origins) -> None:
    from titan_relay.titan.model.families import check_family

    check_family(config, origins)
