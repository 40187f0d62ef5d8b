"""A planted object: unpickling it without care makes a folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Payload:
    """Makes `folder` when it is unpickled."""

    folder: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)

    @property
    def has_run(self) -> bool:
        """Whether somebody has unpickled it."""
        return self.folder.exists()
