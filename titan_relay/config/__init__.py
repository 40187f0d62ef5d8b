"""Configuration: TOML files and the command line become one typed, validated `RunConfig`.

Pure Python: importing this needs no torch, so every rank can refuse a wrong configuration
before a process group starts.
"""

from titan_relay.config.check import check_keys
from titan_relay.config.check_model import check_model
from titan_relay.config.command_line import CommandLine, parse_command_line
from titan_relay.config.degrees import Degrees, degrees_of
from titan_relay.config.errors import ConfigError, Origins
from titan_relay.config.load import Loaded, load, load_config, with_length, with_settings
from titan_relay.config.schema import RunConfig
from titan_relay.config.toml import to_toml

__all__ = [
    "CommandLine",
    "ConfigError",
    "Degrees",
    "Loaded",
    "Origins",
    "RunConfig",
    "check_keys",
    "check_model",
    "degrees_of",
    "load",
    "load_config",
    "parse_command_line",
    "to_toml",
    "with_length",
    "with_settings",
]
