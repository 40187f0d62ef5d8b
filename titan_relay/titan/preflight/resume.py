"""What a run finds in its checkpoint folder, told before anything is built.

The run loads the newest sound checkpoint. This reads the same folder first, so that a finished
run says so, and a checkpoint that cannot be continued is one line instead of a failure inside the
distributed loader.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_relay.config import Origins, RunConfig, to_toml
from titan_relay.config.errors import Refusal
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.safe_pickle import METADATA
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder, damage_of, none_is_sound

_LANE = re.compile(r"dataloader\.lane_\d+")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class FoundCheckpoint:
    """One checkpoint folder.

    shapes: shape of every tensor by its name; empty for a folder of Hugging Face weights.
    num_lanes: rows of the global batch of the run that wrote it; 0 if it holds weights only.
    """

    path: Path
    step: int
    shapes: dict[str, tuple[int, ...]]
    num_lanes: int


def find_checkpoint(run: RunConfig, origins: Origins) -> FoundCheckpoint | None:
    """The checkpoint that the run would continue from; None if it starts fresh.

    Raises:
        ConfigError: `checkpoint.load_step` is not there, or the checkpoint is damaged.
    """
    section = run.checkpoint
    if not section.enable:
        return None
    folder = CheckpointFolder(Path(run.dump_folder) / section.folder)
    steps, step = folder.steps(), folder.step_to_load(section.load_step, to_toml(run))
    if step == section.load_step != -1:
        complete = folder.complete()
        if step not in steps or not any(steps[step].iterdir()):
            there = ", ".join(str(each) for each in complete) or "none"
            raise origins.error(
                "checkpoint.load_step",
                step,
                f"is no complete checkpoint of {folder.path}; there: {there}",
            )
        if damage := damage_of(steps[step]):
            raise origins.error("checkpoint.load_step", step, f"{damage}; {_way_on(complete)}")
    else:
        # Loading looks once more, at the checksums too, and says what it skips.
        step = next((each for each in reversed(steps) if damage_of(steps[each]) is None), -1)
    if step == -1 and steps:
        newest = damage_of(list(steps.values())[-1])
        raise origins.error(
            "checkpoint.load_step", section.load_step, f"{newest}; {none_is_sound(folder)}"
        )
    if step == -1:
        return None
    if not (steps[step] / METADATA).is_file():
        return FoundCheckpoint(steps[step], step, shapes={}, num_lanes=0)
    reader = PartsReader(steps[step])
    shapes = {name: each.shape for name, each in reader.tensors.items()}
    num_lanes = sum(bool(_LANE.fullmatch(name)) for name in reader.names)
    return FoundCheckpoint(steps[step], step, shapes, num_lanes)


def _way_on(complete: dict[int, Path]) -> str:
    whole = next((each for each in reversed(complete) if damage_of(complete[each]) is None), -1)
    if whole == -1:
        return "no other one is sound"
    return f"go on from step {whole} with checkpoint.load_step"


def check_checkpoint(
    run: RunConfig, origins: Origins, found: FoundCheckpoint, global_batch_size: int
) -> None:
    """Refuse a checkpoint that this run cannot go on from.

    Raises:
        ConfigError: one line with the key to change.
    """
    origins.refuse(run, _check_model(run, found), _check_data(run, found, global_batch_size))


def _check_data(
    run: RunConfig, found: FoundCheckpoint, global_batch_size: int
) -> Iterator[Refusal]:
    """The position in the data is there, and of lanes like this run's."""
    starts_data_anew = found.step == 0 or "dataloader" in run.checkpoint.exclude_from_loading
    if starts_data_anew and found.shapes:
        return
    if found.num_lanes == 0:
        yield Refusal(
            "training.steps",
            f"cannot go on from {found.path}, which holds weights only "
            "(checkpoint.last_save_model_only or last_save_in_hf); go on from an earlier step "
            "with checkpoint.load_step, or start a new run from it with "
            "checkpoint.initial_load_path",
        )
    if found.num_lanes != global_batch_size:
        yield Refusal(
            "training.global_batch_size",
            f"was {found.num_lanes} in {found.path}, and the position in the data depends on it; "
            'set it back, or start the data anew with checkpoint.exclude_from_loading "dataloader"',
            global_batch_size,
        )


def check_dump_folder(run: RunConfig, origins: Origins) -> None:
    """Refuse a folder that cannot be written to.

    Raises:
        ConfigError: one line with the reason.
    """
    folder = Path(run.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise origins.error(
            "dump_folder", run.dump_folder, f"cannot be written to: {error.strerror}"
        ) from error


def _check_model(run: RunConfig, found: FoundCheckpoint) -> Iterator[Refusal]:
    """The weights are of this model; yields a `Refusal` of each key that differs."""
    if not found.shapes:
        return
    model, moe = run.model, run.model.moe
    layers = {int(each[1]) for key in found.shapes if (each := _LAYER.match(key))}
    experts = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    expected = [
        ("model.vocab_size", model.vocab_size, _size(found, "tok_embeddings.weight", 0)),
        ("model.dim", model.dim, _size(found, "tok_embeddings.weight", 1)),
        ("model.num_layers", model.num_layers, len(layers)),
        ("model.moe.num_experts", moe.num_experts, _size(found, experts, 0)),
        ("model.moe.expert_dim", moe.expert_dim, _size(found, experts, 1)),
    ]
    for key, value, saved in expected:
        if saved is not None and saved != value:
            fix = f"was {saved} in {found.path}; set it back, or use another dump_folder"
            yield Refusal(key, fix)
    coeff = moe.effective_load_balance_coeff
    if coeff > 0 and not any(key.endswith("expert_bias_E") for key in found.shapes):
        fix = f"{found.path} has no balancing biases; set it to 0 to go on without them"
        yield Refusal("model.moe.load_balance_coeff", fix, coeff)


def _size(found: FoundCheckpoint, name: str, dim: int) -> int | None:
    shape = found.shapes.get(name)
    return None if shape is None else shape[dim]
