"""Records every allocation of a trainer's step, and in which part of the model it was made.

Parts are told apart by hooks on the model's modules. Going backward, a part begins when the
gradient of its output is there; a recomputed forward runs the forward hooks again, within backward.
Works on any trainer, on fake tensors or real ones; hooks stay, so record with a trainer that is not
needed for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from titan_relay.measure import LiveBytes
from titan_relay.measure.step_memory import Category, Mark, StepMemory, step_memory
from titan_relay.private_torch import around_fsdp_steps, in_backward
from titan_relay.titan.train.trainer import RelayTrainer, StepObserver

_BLOCK_PART = re.compile(r"layers\.(\d+)(?:\.(\w+))?$")
_PARTS = {
    "attention_norm": "attention",
    "attention": "attention",
    "ffn_norm": "experts",
    "moe": "experts",
    "feed_forward": "dense",
}


def record_step(trainer: RelayTrainer, watch: Callable[[str], None] | None = None) -> StepMemory:
    """Run one training step and account for all of it.

    On real ranks every rank calls it. `watch` is called with each phase as it begins.
    """
    tracker = LiveBytes(keep_events=True)
    tracker.include(*trainer.model_parts, *trainer.optimizers.optimizers, name=Category.PARAMETERS)
    recorder = _Recorder(tracker, trainer, watch)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step += 1
    with recorder.watching(), trainer.observed(recorder), tracker:
        trainer.train_step(batches)
    recorder.owners[Category.OPTIMIZER] |= tracker.serials_of(*trainer.optimizers.optimizers)
    return step_memory(
        tracker.events, recorder.marks, recorder.owners, host_bytes=tracker.host_peak_bytes
    )


class _Recorder(StepObserver):
    def __init__(
        self, tracker: LiveBytes, trainer: RelayTrainer, watch: Callable[[str], None] | None
    ) -> None:
        self.marks: list[Mark] = []
        self._watch = watch
        self._tracker = tracker
        self._trainer = trainer
        self._inside: list[str] = []  # forward or recomputed parts that are running
        self._backward = ""  # the part whose backward runs
        self._after_blocks = ""
        # Serials by category, filled as the owners become known.
        self.owners = {
            Category.PARAMETERS: tracker.serials_of(*trainer.model_parts),
            Category.OPTIMIZER: tracker.serials_of(*trainer.optimizers.optimizers),
            Category.GRADIENTS: set[int](),
            Category.BLOCK_INPUTS: set[int](),
        }

    def before_microbatch(self) -> None:
        """The batch's own tensors belong to the input."""
        self._mark("forward input")

    def after_microbatch(self) -> None:
        """Until another one begins, what is made is the optimizer's."""
        self._after_blocks = self._backward = ""
        self._mark("optimizer step")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the step through the model's parts."""
        for part in self._trainer.model_parts:
            self._hook_part(part)
        hook = self._trainer.optimizers.register_step_pre_hook(self._take_gradients)
        self._mark("forward input")
        try:
            with around_fsdp_steps(self._in_fsdp):
                yield
        finally:
            hook.remove()

    def _hook_part(self, part: nn.Module) -> None:
        blocks = part.get_submodule("layers")
        last = str(max((int(name) for name, _ in blocks.named_children()), default=-1))
        for name, module in part.named_modules():
            name = name.replace("_checkpoint_wrapped_module.", "")
            if name.endswith("_checkpoint_wrapped_module"):
                continue
            match = _BLOCK_PART.fullmatch(name)
            if name == "tok_embeddings":
                self._hook(module, "embedding")
            elif match and match[2] is None:
                module.register_forward_pre_hook(self._enter_block)
                if match[1] == last:
                    module.register_forward_hook(self._leave_last_block)
            elif match and match[2] in _PARTS:
                self._hook(module, f"{_PARTS[match[2]]} {match[1]}")

    def _hook(self, module: nn.Module, part: str) -> None:
        def enter(*_: Any) -> None:
            self._inside.append(part)
            self._mark(self._here())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            self._mark(self._here())
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._enter_backward(part))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _here(self) -> str:
        if self._inside:
            return f"{'recompute' if in_backward() else 'forward'} {self._inside[-1]}"
        if in_backward() and self._backward:
            return self._backward
        return self._after_blocks or "forward blocks"

    def _enter_block(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._after_blocks = self._backward = ""
            self.owners[Category.BLOCK_INPUTS] |= self._tracker.serials_of(args[0])

    def _leave_last_block(self, *_: Any) -> None:
        if not in_backward():
            self._after_blocks = "forward loss"
            self._mark(self._here())

    def _enter_backward(self, part: str) -> None:
        self._backward = f"backward {part}"
        self._mark(self._here())

    def _take_gradients(self, *_: Any) -> None:
        parameters = [p for part in self._trainer.model_parts for p in part.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.owners[Category.GRADIENTS] = self._tracker.serials_of(gradients)

    def _mark(self, phase: str) -> None:
        self._tracker.name_phase(phase)
        if not self.marks or self.marks[-1].phase != phase:
            self.marks.append(Mark(self._tracker.num_events, phase))
            if self._watch is not None:
                self._watch(phase)

    @contextmanager
    def _in_fsdp(self) -> Iterator[None]:
        """Label what FSDP allocates; the parts around it go on as they were."""
        phase = self.marks[-1].phase
        self._tracker.name_phase(f"fsdp {phase}")
        try:
            yield
        finally:
            self._tracker.name_phase(phase)
