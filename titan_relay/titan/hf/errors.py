"""The one kind of error that a folder or file of Hugging Face's can cause."""

from titan_relay.config import ConfigError


class HfError(ConfigError):
    """A folder that cannot be used; ``str()`` is one line naming file, name and fix."""
