"""Does the trainer compute what `transformers` computes? One step of each, and every difference.

The step is the trainer's own: the folder is loaded as `initial_load_in_hf` loads it, tokens are
split over ranks and cut by context parallelism as in a run, gradients are summed by FSDP.

Shape suffixes: B rows, S tokens of a row with its last label, L tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_relay.config.schema import (
    CheckpointConfig,
    DataConfig,
    ParallelismConfig,
    RunConfig,
    TokenizerConfig,
    TrainingConfig,
)
from titan_relay.data.tokenizer_files import write_rank_file
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.safetensors_file import read_places, read_tensor
from titan_relay.titan.train.build import build_trainer_config

# A gradient that cancels to rounding noise, such as that of a key's bias, has no relative error to
# speak of: differences are taken relative to at least this share of the largest gradient.
_NOISE_SHARE = 1e-3


@dataclass(frozen=True)
class Layout:
    """How the step is spread: context- and expert-parallel degrees; the rest is data parallel."""

    ep: int = 1
    cp: int = 1
    dispatcher: Literal["relay", "alltoall"] = "relay"
    circulate: Literal["auto", "experts", "tokens"] = "auto"

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes."""
        return max(self.ep, self.cp)


@dataclass(frozen=True)
class Deviation:
    """A tensor's largest difference, and the size of what it is a difference of."""

    name: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """largest / scale; infinite or NaN values count as infinitely wrong."""
        if self.largest == 0:
            return 0.0
        finite = self.largest < float("inf") and self.scale > 0
        return self.largest / self.scale if finite else float("inf")


@dataclass(frozen=True)
class Comparison:
    """Differences of the logits, of the loss, and of every gradient, worst first."""

    logits: Deviation
    loss: Deviation
    gradients: list[Deviation]

    @property
    def worst(self) -> Deviation:
        """The largest of all, relatively."""
        return max([self.logits, self.loss, *self.gradients], key=lambda each: each.relative)


def comparison_run(
    run: RunConfig, layout: Layout, hf_dir: Path, folder: Path, shape: tuple[int, int]
) -> RunConfig:
    """The run of one step on rows of `shape` `(B, S)`: the model and ring of `run`, all else plain.

    What only training adds (balancing losses and biases) is off; `folder` gets a substitute for the
    data, which is never read.
    """
    num_rows, row_len = shape
    (folder / "data.jsonl").write_text(json.dumps({"text": "never read"}) + "\n")
    write_rank_file(folder / "ranks.tiktoken", {bytes([byte]): byte for byte in range(256)})
    moe = replace(run.model.moe, aux_loss_coeff=0.0, z_loss_coeff=0.0, load_balance_coeff=0.0)
    data_ranks = layout.num_ranks // layout.cp
    return RunConfig(
        dump_folder=str(folder / "run"),
        model=replace(run.model, moe=moe, max_seq_len=max(run.model.max_seq_len, row_len - 1)),
        relay=replace(
            run.relay,
            dispatcher=layout.dispatcher,
            circulate=layout.circulate,
            grad_dtype="float32",
        ),
        training=TrainingConfig(
            seq_len=row_len - 1,
            local_batch_size=num_rows // data_ranks,
            global_batch_size=num_rows,
            steps=1,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=data_ranks,
            context_parallel_degree=layout.cp,
            expert_parallel_degree=layout.ep,
        ),
        checkpoint=CheckpointConfig(
            enable=True,
            load_only=True,
            initial_load_path=str(hf_dir.resolve()),
            initial_load_in_hf=True,
        ),
        data=DataConfig(files=(str(folder / "data.jsonl"),)),
        tokenizer=TokenizerConfig(
            kind="tiktoken", path=str(folder / "ranks.tiktoken"), add_bos=False, add_eos=False
        ),
    )


def compare_on_rank(run: RunConfig, tokens_BS: torch.Tensor, reference: Path) -> Comparison | None:
    """Run the step on this rank of an initialised process group; rank 0 gets the comparison.

    Args:
        tokens_BS: all rows, the same on every rank; the last id of each is a label only.
        reference: where `reference_step` wrote.
    """
    trainer = build_trainer_config(run, dist.get_world_size()).build()
    try:
        trainer.checkpointer.load()
        # As the reference: what is random in training (Phi's sampling) is off.
        trainer.model_parts[0].eval()
        loss, logits = _step(trainer, tokens_BS)
        gradients = _gradients(trainer, NameMap(run.model), reference)
        if dist.get_rank() != 0:
            for _ in gradients:
                pass  # every rank takes part in gathering each gradient
            return None
        return _compare(loss, logits, list(gradients), reference)
    finally:
        trainer.close()


def _step(trainer: Any, tokens_BS: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Forward and backward; returns the loss and all logits `(B, S - 1, V)`, which rank 0 has."""
    num_rows, row_len = tokens_BS.shape
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    index, count = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    rows = slice(index * num_rows // count, (index + 1) * num_rows // count)
    tokens = tokens_BS.to(trainer.device)
    positions = torch.arange(row_len - 1, device=trainer.device).repeat(num_rows // count, 1)
    number = torch.arange(num_rows * (row_len - 1), device=trainer.device).view(num_rows, -1)

    captured: list[torch.Tensor] = []
    head = trainer.model_parts[0].lm_head
    hook = head.register_forward_hook(lambda _m, _i, out: captured.append(out.detach()))
    loss = trainer.forward_backward_step(
        input_dict={"input": tokens[rows, :-1], "positions": positions},
        labels=tokens[rows, 1:].contiguous(),
        global_valid_tokens=torch.tensor(num_rows * (row_len - 1), device=trainer.device),
    ).detach()
    hook.remove()
    # Which tokens this rank had, after context parallelism cut the rows.
    mine, _, _ = trainer.post_dataloading_process(
        {"input": number[rows], "positions": positions}, number[rows].contiguous()
    )
    dist.all_reduce(loss)
    logits = _full(captured[0]).cpu()
    return float(loss), _gathered(mine.cpu(), logits, num_rows * (row_len - 1))


def _gathered(number_BL: torch.Tensor, logits_BLV: torch.Tensor, num_tokens: int) -> torch.Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(
        (number_BL.flatten(), logits_BLV.flatten(0, 1)), parts if dist.get_rank() == 0 else None
    )
    logits = torch.full((num_tokens, logits_BLV.shape[-1]), float("nan"))
    for part in parts if dist.get_rank() == 0 else []:
        logits[part[0]] = part[1].float()
    return logits


def _gradients(trainer: Any, names: NameMap, reference: Path) -> Iterator[Deviation]:
    """The difference of every gradient, under the names of the folder's tensors."""
    places = read_places(reference / GRADIENTS)
    found = set()
    for name, parameter in trainer.model_parts[0].named_parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradient = _full(gradient).cpu().float()
        if dist.get_rank() != 0:
            continue
        for hf_name, value in names.to_hf(canonical_fqn(name), gradient).items():
            found.add(hf_name)
            yield _difference(hf_name, value, read_tensor(reference / GRADIENTS, places[hf_name]))

    if dist.get_rank() == 0 and found != set(places):
        raise HfError(f"gradients of one side only: {sorted(found ^ set(places))}")


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _difference(name: str, value: torch.Tensor, reference: torch.Tensor) -> Deviation:
    if value.numel() == 0:
        return Deviation(name, 0.0, 0.0)
    return Deviation(name, (value - reference).abs().max().item(), reference.abs().max().item())


def _compare(
    loss: float, logits: torch.Tensor, gradients: list[Deviation], reference: Path
) -> Comparison:
    places = read_places(reference / OUTPUTS)
    expected = {name: read_tensor(reference / OUTPUTS, each) for name, each in places.items()}
    noise = _NOISE_SHARE * max(each.scale for each in gradients)
    gradients = [replace(each, scale=max(each.scale, noise)) for each in gradients]
    return Comparison(
        logits=_difference("logits", logits, expected["logits"].flatten(0, 1)),
        loss=_difference("loss", torch.tensor(loss), expected["loss"]),
        gradients=sorted(gradients, key=lambda each: -each.relative),
    )


GRADIENTS, OUTPUTS = "gradients.safetensors", "outputs.safetensors"


def reference_step(hf_dir: Path, tokens_BS: torch.Tensor, out: Path) -> None:
    """Run one forward and backward in float32 on CPU, in evaluation mode, and write the results.

    Args:
        tokens_BS: ids; the last of each row is a label only.
        out: gets the gradients under the names of the folder's tensors, the logits `(B, S - 1, V)`
            and the mean cross-entropy over all labels.

    Raises:
        HfError: `transformers` is not there, or cannot load the folder.
    """
    try:
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise HfError(f"transformers is needed to compare with: {error}") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(
            hf_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise HfError(f"transformers cannot load {hf_dir}: {error}") from error
    model.eval()
    logits_BLV = model(input_ids=tokens_BS[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
    loss.backward()
    # transformers keeps experts together in memory and apart in files; saving takes them apart,
    # and that is linear, so gradients go the same way as weights.
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }
    gradients = revert_weight_conversion(model, gradients)
    save_file({name: each.contiguous() for name, each in gradients.items()}, out / GRADIENTS)
    outputs = {"logits": logits_BLV.detach().contiguous(), "loss": loss.detach()}
    save_file(outputs, out / OUTPUTS)
