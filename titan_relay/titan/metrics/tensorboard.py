"""TensorBoard curves that a resumed run goes on with: same folder, one point per step.

A run killed after step 8 and resumed from the checkpoint of step 5 writes steps 6 to 8 again.
TensorBoard drops the first versions if the new file says from which step on it replaces what came
before. That step is known only once the checkpoint is loaded, so the file is opened at the first
point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from titan_relay.titan.metrics.folder_lock import FolderError, FolderLock

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# A file from this far in the future is another clock's, not the last run's of a moment ago.
_LONGEST_WAIT_SECONDS = 3.0


class CurveLogger(BaseLogger):
    """Writes scalars of one run into one folder, which it holds alone.

    Args:
        folder: where event files go; made if missing.
        first_step: gives the first step that this process trains, when the first point is
            written; points from that step on which an earlier run left are replaced. None: not
            known, then it is the step of the first point.

    Raises:
        FolderError: another run holds the folder, it cannot be written to, or it holds files from
            the future (TensorBoard orders files by the second in their names).
    """

    def __init__(self, folder: Path, first_step: Callable[[], int | None]) -> None:
        self._folder = folder
        self._first_step = first_step
        self._writer: SummaryWriter | None = None
        self._lock = FolderLock(folder)
        ahead_seconds = newest_file_time(folder) - time.time()
        if ahead_seconds > _LONGEST_WAIT_SECONDS:
            self._lock.release()
            raise FolderError(
                f"{folder}: holds curves from {ahead_seconds:.0f} s in the future, which would "
                "hide this run's; set the clock right or choose another metrics.save_tb_folder"
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one point per curve and hand it to the operating system at once.

        Without that a killed run would lose points that its checkpoint is past.
        """
        if self._writer is None:
            self._writer = self._open(step)
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write one text, shown as Markdown."""
        if self._writer is None:
            self._writer = self._open(step)
        self._writer.add_text(tag, text, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file and let other runs use the folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._lock.release()

    def _open(self, step: int) -> SummaryWriter:
        # Readers take files in the order of their names, which begin with the second of opening.
        while (newest := newest_file_time(self._folder)) >= int(time.time()):
            time.sleep(max(0.01, newest + 1 - time.time()))
        first_step = self._first_step()
        purge_step = step if first_step is None else first_step
        logger.info(f"TensorBoard curves from step {purge_step} on go to {self._folder}")
        from torch.utils.tensorboard import SummaryWriter  # plans are made without the package

        return SummaryWriter(str(self._folder), max_queue=1000, purge_step=purge_step)


def newest_file_time(folder: Path) -> int:
    """The latest second in the names of the folder's event files; 0 without any."""
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    return max((int(second) for second in seconds if second.isdigit()), default=0)
