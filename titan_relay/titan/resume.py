"""What a run finds in its checkpoint folder, told before anything is built.

torchtitan loads the newest complete checkpoint. This reads the same folder first, so that a
finished run says so, and a checkpoint that cannot be continued is one line instead of a failure
inside the distributed loader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from titan_relay.config import RunConfig, Sources

_LANE = re.compile(r"dataloader\.lane_\d+")


@dataclass(frozen=True)
class FoundCheckpoint:
    """One checkpoint folder.

    num_lanes: rows of the global batch of the run that wrote it; 0 if it holds weights only.
    """

    path: Path
    step: int
    num_lanes: int


def find_checkpoint(run: RunConfig) -> FoundCheckpoint | None:
    """The checkpoint that the run would continue from; None if it starts fresh."""
    section = run.checkpoint
    folder = Path(run.dump_folder) / section.folder
    if not section.enable or section.load_step == 0:  # step 0 loads weights only
        return None
    steps = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    complete = {step: path for step, path in steps.items() if _is_complete(path)}
    step = max(complete, default=-1) if section.load_step == -1 else section.load_step
    if step not in complete:
        return None
    path = complete[step]
    if not (path / ".metadata").is_file():
        return FoundCheckpoint(path, step, num_lanes=0)
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    return FoundCheckpoint(path, step, num_lanes=sum(bool(_LANE.fullmatch(key)) for key in keys))


def check_checkpoint(
    run: RunConfig, sources: Sources, found: FoundCheckpoint, global_batch_size: int
) -> None:
    """Refuse a checkpoint that this run cannot go on from.

    Raises:
        ConfigError: one line with the key to change.
    """
    if "dataloader" in run.checkpoint.exclude_from_loading:
        return
    if found.num_lanes == 0:
        raise sources.error(
            "training.steps",
            run.training.steps,
            f"cannot go on from {found.path}, which holds weights only "
            "(checkpoint.last_save_model_only or last_save_in_hf); go on from an earlier step "
            "with checkpoint.load_step, or start a new run from it with "
            "checkpoint.initial_load_path",
        )
    if found.num_lanes != global_batch_size:
        raise sources.error(
            "training.global_batch_size",
            global_batch_size,
            f"was {found.num_lanes} in {found.path}, and the position in the data depends on it; "
            'set it back, or start the data anew with checkpoint.exclude_from_loading "dataloader"',
        )


def _is_complete(path: Path) -> bool:
    """Whether torchtitan would take the folder for a checkpoint: its last file is there."""
    return any((path / name).is_file() for name in (".metadata", "model.safetensors.index.json"))
