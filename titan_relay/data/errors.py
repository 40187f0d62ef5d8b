"""The one kind of error that documents, tokenizers and saved reader positions can cause."""

from titan_relay.config import ConfigError


class DataError(ConfigError):
    """Data that cannot be trained on; ``str()`` is one line naming key or file, value and fix."""
