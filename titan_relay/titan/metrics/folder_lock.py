"""One run per folder of curves: a lock that dies with its process.

Two runs that write into one folder give one muddled set of curves. The first takes an advisory
lock on a file in the folder; the kernel releases it when the process ends, however it ends, so a
lock can never be left behind by a run that was killed. The file's text names the owner.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from datetime import datetime
from pathlib import Path

LOCK_FILE_NAME = ".lock"


class FolderError(ValueError):
    """A folder that this run cannot write its curves to; one line with folder and fix."""


class FolderLock:
    """Exclusive use of a folder, from construction to `release` or the end of the process.

    wait_s: for another process that may be about to end, as ranks whose launcher was killed are.

    Raises:
        FolderError: another process holds the folder, or it cannot be written to.
    """

    def __init__(self, folder: Path, wait_s: float = 0.0) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / LOCK_FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise FolderError(
                f"{folder}: cannot be written to ({error.strerror}); choose another dump_folder"
            ) from error
        try:
            self._lock(time.monotonic() + wait_s)
        except OSError as error:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise FolderError(_refusal(folder, owner, error)) from error
        os.ftruncate(self._file, 0)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        os.pwrite(self._file, f"{owner}\n".encode(), 0)

    def _lock(self, until: float) -> None:
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)

    def release(self) -> None:
        """Let others use the folder. Calling it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _refusal(folder: Path, owner: str, error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return (
            f"{folder}: another run is writing there ({owner or 'owner unknown'}); "
            "stop it, or give this run another dump_folder"
        )
    return (
        f"{folder}: its file system cannot lock files ({error.strerror}), so two runs could mix "
        "what they write; choose a dump_folder on another file system"
    )
