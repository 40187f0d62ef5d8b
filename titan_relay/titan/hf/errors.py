"""The one kind of error that a folder or file of Hugging Face's can cause."""

from __future__ import annotations


class HfError(ValueError):
    """A folder that cannot be used; ``str()`` is one line naming file, name and fix."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
