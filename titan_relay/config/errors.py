"""The one kind of error that a user's configuration can cause."""


class ConfigError(ValueError):
    """A configuration that cannot run; ``str()`` is one line naming place, key, value and fix."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))
