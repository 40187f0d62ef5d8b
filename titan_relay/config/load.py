"""From arguments or a file to one `RunConfig`: command line over file over base over default.

Nothing here prints or exits, and nothing imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_relay.config.command_line import CommandLine, parse_command_line
from titan_relay.config.errors import COMMAND_LINE, ConfigError
from titan_relay.config.schema import RunConfig
from titan_relay.config.settings import Sources, build
from titan_relay.config.toml_files import read_file


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values came from, for `validate` and its messages."""

    config: RunConfig
    sources: Sources
    print_config: bool = False
    plan: bool = False


def load_config(argv: Sequence[str]) -> Loaded:
    """Read arguments such as ``["--config", "a.toml", "--training.steps", "5"]``.

    The values are of the right types and ranges; `validate` checks that they go together.
    Raises `ConfigError`. ``--help`` is the caller's: see `parse_command_line`.
    """
    return load(parse_command_line(argv))


def load(command: CommandLine) -> Loaded:
    """The configuration that a parsed command line asks for; raises `ConfigError`."""
    if command.config_file is None:
        raise ConfigError(
            f"{COMMAND_LINE}: --config is missing: name a TOML file, "
            "as in --config train_configs/demo.toml"
        )
    settings = read_file(command.config_file) | dict(command.settings)
    given = {path: setting.source for path, setting in settings.items()}
    config = build(settings, command.config_file)
    sources = Sources(command.config_file, given)
    return Loaded(config, sources, command.print_config, command.plan)
