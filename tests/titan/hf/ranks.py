"""Our side of the comparison with transformers, on one or more ranks, through the real trainer."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.titan.hf.cases import SEQ_LEN, Case
from tests.titan.hf.reference import BIAS_ON_CHOICE
from tests.titan.runs import Run, trainer_of


@dataclass(frozen=True)
class Layout:
    """How ranks and experts are arranged: a name and settings of the run."""

    name: str
    settings: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Differences:
    """Largest relative differences from transformers on one rank; a gradient's by its name."""

    logits: float
    loss: float
    grads: dict[str, float]

    def largest(self) -> tuple[float, str]:
        """The largest of all and what it is of."""
        found = {"logits": self.logits, "loss": self.loss} | self.grads
        name = max(found, key=found.__getitem__)
        return found[name], name


@dataclass(frozen=True)
class Job:
    """One model in one layout; `index` is the model's folder."""

    index: int
    case: Case
    layout: Layout

    def __str__(self) -> str:
        return f"{self.case.family} ({self.case.name}) {self.layout.name}"


def compare_all(folder: str, jobs: list[Job]) -> dict[str, Differences]:
    """Differences by job, as this rank sees them."""
    torch.set_num_threads(1)
    return {str(job): compare(Path(folder), job) for job in jobs}


def compare(folder: Path, job: Job) -> Differences:
    """Load the checkpoint, run one step's forward and backward, and compare."""
    name = f"{job.index}-{job.layout.name}"
    trainer = trainer_of(folder, Run(name, _settings(job.case) + job.layout.settings))
    try:
        return _compare(trainer, folder / str(job.index), job.case.training)
    finally:
        trainer.close()
        del trainer
        gc.collect()


def _settings(case: Case) -> tuple[tuple[str, Any], ...]:
    model = tuple((f"model.{key}", value) for key, value in case.model.items())
    return (
        *model,
        ("training.seq_len", SEQ_LEN),
        ("metrics.enable_tensorboard", False),
        ("activation_checkpoint.mode", "none"),
    )


def _compare(trainer: Any, folder: Path, training: bool) -> Differences:
    from torchtitan.components.checkpointer.utils import canonical_fqn

    from titan_relay.titan.model.families import FAMILIES

    model = trainer.model_parts[0]
    family = FAMILIES[trainer.config.run.model.family]
    adapter = family.adapter(trainer.model_config, None)
    load_weights(model, adapter.from_hf(read_checkpoint(folder / "weights")))
    expected = torch.load(folder / "outputs.pt")
    model.train(training)
    batch, labels, rows = _batch_of_rank(trainer, expected["tokens"])

    index_BS = torch.arange(SEQ_LEN).expand(len(labels), SEQ_LEN).contiguous()
    inputs, index_BL, kwargs = trainer.post_dataloading_process(dict(batch), index_BS)
    with torch.no_grad():
        logits = _whole(model(inputs, **kwargs))
    expected_logits = expected["logits"][rows].gather(
        1, index_BL[..., None].expand_as(logits).contiguous()
    )

    num_valid = torch.tensor(float(expected["tokens"][:, 1:].numel()))
    loss = trainer.forward_backward_step(
        input_dict=batch, labels=labels, global_valid_tokens=num_valid
    ).detach()
    loss_mesh = trainer.parallel_dims.get_optional_mesh("loss")
    if loss_mesh is not None:  # ranks with different tokens; tensor parallelism repeats them
        dist.all_reduce(loss, group=loss_mesh.get_group())
    grads = adapter.to_hf(
        {canonical_fqn(name): _whole(p.grad) for name, p in model.named_parameters()}
    )
    return Differences(
        logits=_relative(logits, expected_logits),
        loss=abs(loss.item() / expected["loss"] - 1),
        grads=_compare_grads(grads, read_checkpoint(folder / "grads")),
    )


def _batch_of_rank(trainer: Any, tokens: torch.Tensor) -> tuple[dict, torch.Tensor, slice]:
    """This rank's rows of a batch, as its data loader would give them; and which they are."""
    dims = trainer.parallel_dims
    mesh = dims.get_optional_mesh("batch")
    rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    count = len(tokens) // size
    rows = slice(rank * count, (rank + 1) * count)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    lanes = torch.arange(len(tokens))[rows]
    batch = {"input": tokens[rows], "positions": positions[rows], "lanes": lanes}
    return batch, labels[rows], rows


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Fill a model, sharded or not, from whole tensors; every name must be there."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(model, weights, options=options)


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint."""
    from safetensors.torch import load_file

    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def _whole(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _compare_grads(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> dict[str, float]:
    theirs = {name: grad for name, grad in theirs.items() if not name.endswith(BIAS_ON_CHOICE)}
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {name: _relative(grad, theirs[name]) for name, grad in ours.items()}


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, in units of the largest expected value."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = theirs.abs().max().item()
    largest = (ours - theirs).abs().max().item()
    return largest if scale == 0 else largest / scale
