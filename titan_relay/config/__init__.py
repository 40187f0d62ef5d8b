"""Configuration: TOML files and the command line become one typed, validated `RunConfig`.

Pure Python: importing this needs no torch, so every rank can refuse a wrong configuration
before a process group starts.
"""

from titan_relay.config.errors import ConfigError
from titan_relay.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig"]
