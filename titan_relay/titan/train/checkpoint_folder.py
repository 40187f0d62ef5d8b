"""Which folders are a run's checkpoints: the one rule for finding, loading and deleting them.

A checkpoint of step N is a folder `step-N`, spelled as saving spells it. It is complete if it holds
the mark of its files and they have the sizes that the mark says, or was written to its end before
there were marks. While it is written its name ends in `.saving`, and while it is deleted in
`.deleting`: such a name is a killed run's, once nobody runs, and is removed before the next save.
Whatever else lies beside it (copies, folders of other tools) is not found, loaded or deleted.

Checkpoints of one folder form one line of training, each made from the one before. A run that
starts from an earlier step begins a new line: later steps get another name before its first
checkpoint, so the newest is always the one that was written last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titan_relay.titan.hf.completion import SAVING, check_sizes, marked_step, sync_folder
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.safe_pickle import METADATA

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_DELETING = ".deleting"
_WRITTEN_LAST = (METADATA, "model.safetensors.index.json")


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder that a run keeps its checkpoints in; it need not exist."""

    path: Path

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.path / f"step-{step}"

    def saving(self, step: int) -> Path:
        """Where a step is while it is written."""
        return self.path / f"step-{step}{SAVING}"

    def publish(self, step: int) -> Path | None:
        """Rename what is written, with its mark, to what it is. What stands there, which was never
        loaded, gets another name: returns that, if so."""
        target, aside = self.of_step(step), None
        if target.exists():
            aside = target.rename(_free(f"{target}.replaced"))
        self.saving(step).rename(target)
        sync_folder(self.path)
        return aside

    def leftovers(self) -> list[Path]:
        """What a killed run was writing or deleting; or this one is."""
        ends = (SAVING, _DELETING)
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(
            path
            for path in found
            if path.suffix in ends and _STEP.fullmatch(path.stem) and path.is_dir()
        )

    def steps(self) -> dict[int, Path]:
        """All checkpoints by step, rising, complete or not."""
        if not self.path.is_dir():
            return {}
        named = ((_STEP.fullmatch(path.name), path) for path in self.path.iterdir())
        return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))

    def complete(self) -> dict[int, Path]:
        """Those of which saving came to its end, and that are of the step in their name: a copy or
        a link under another number is none."""
        return {
            step: path
            for step, path in self.steps().items()
            if is_complete(path) and marked_step(path) in (None, step)
        }

    @property
    def request(self) -> Path:
        """Holds the configuration of the run that began the newest line by `load_step`."""
        return self.path / "load_step.toml"

    def step_to_load(self, load_step: int, request: str) -> int:
        """The step that a run goes on from; -1: none, it starts fresh.

        A step that was asked for may be missing. A run that goes back and is started again, by a
        person or after a failure by a launcher, does not go back once more and lose what it has
        done since: it goes on with the line that it began.

        Args:
            load_step: `checkpoint.load_step`; -1: the newest.
            request: the run's configuration, in which it stands.
        """
        newest = max(self.complete(), default=-1)
        began_it = self.request.is_file() and self.request.read_bytes() == request.encode()
        return newest if load_step == -1 or (began_it and load_step < newest) else load_step

    def begin_line(self, step: int, load_step: int, request: str) -> list[Path]:
        """What a run that starts at `step` does before its first checkpoint: rename what it leaves
        behind, and keep the request that it followed. Returns where the renamed ones are.
        """
        later = [path for each, path in self.complete().items() if each > step]
        aside = [path.rename(_free(f"{path}.after-going-back-to-{step}")) for path in later]
        if load_step == -1:
            self.request.unlink(missing_ok=True)
        else:
            self.request.write_bytes(request.encode())
        return aside

    def stale(self, keep: int, *, saved: int, loaded: int) -> list[Path]:
        """What the newest `keep` complete checkpoints make superfluous, oldest first.

        Args:
            saved: the step just saved, or being saved and therefore incomplete; never stale, nor is
                a later one, which is not of this run.
            loaded: the step that this run started from, never stale either.
        """
        complete = {step: path for step, path in self.complete().items() if step <= saved}
        old = list(complete)[:-keep]
        # A link is somebody's way to a checkpoint that lies elsewhere, and so not ours.
        return [
            complete[s] for s in old if s not in (saved, loaded) and not complete[s].is_symlink()
        ]


def is_complete(checkpoint: Path) -> bool:
    """Whether saving came to its end, and the files have the sizes that it gave them."""
    try:
        check_sizes(checkpoint)
    except HfError:
        return False
    return any((checkpoint / name).is_file() for name in _WRITTEN_LAST)


def damage_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be loaded, in words, as far as is seen without reading weights."""
    try:
        check_sizes(checkpoint)
        if not any((checkpoint / name).is_file() for name in _WRITTEN_LAST):
            return f"{checkpoint} was not written to its end: it has no {METADATA}"
        if (checkpoint / METADATA).is_file():
            PartsReader(checkpoint)
    except HfError as error:
        return str(error)
    return None


def none_is_sound(folder: CheckpointFolder) -> str:
    """What is said where checkpoints are and none can be loaded."""
    return (
        f"no checkpoint of {folder.path} can be loaded, and a run does not start over while there "
        "are some; move them elsewhere, or use another dump_folder"
    )


def retire(checkpoint: Path) -> Path:
    """Let a checkpoint no longer be one, before it is deleted: a deletion may be cut short.

    Returns: its name now.
    """
    return checkpoint.rename(_free(f"{checkpoint}{_DELETING}"))


def _free(name: str) -> Path:
    """That path, or with the lowest number from 2 on behind it that makes it new."""
    path, number = Path(name), 1
    while path.exists():
        number += 1
        path = Path(f"{name}-{number}")
    return path
