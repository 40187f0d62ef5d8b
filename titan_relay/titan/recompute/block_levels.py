"""`[attention_retention]` on torchtitan's blocks: whole blocks are checkpointed, and what a level
keeps are retained calls (`titan_relay.recompute.retained`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from titan_relay.private_torch import checkpoint_wrapper
from titan_relay.recompute import relay_checkpoint
from titan_relay.recompute.clock import CallClock
from titan_relay.recompute.frame import Keeps
from titan_relay.recompute.host_inputs import HostInputs
from titan_relay.recompute.levels import Level
from titan_relay.recompute.retained import retained_call

KERNEL = "attention kernel"
PROJECTION = "attention projection"
_CALLS: dict[Level, frozenset[str]] = {
    "recompute": frozenset(),
    "output": frozenset({KERNEL}),
    "full": frozenset({KERNEL, PROJECTION}),
}


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention: query heads, features of its output and of its projections."""

    num_heads: int
    out_features: int
    projected_features: int
    projection_weights: int


@dataclass
class Levels:
    """The level of every layer on this rank, by its index; may change between steps only.

    shapes: filled in when the model is parallelised. clock: times attention's parts, if anybody
    wants to know. host: where block inputs wait, if not on the device.
    """

    of_layer: dict[int, Level] = field(default_factory=dict)
    shapes: dict[int, AttentionShape] = field(default_factory=dict)
    clock: CallClock | None = None
    host: HostInputs | None = None

    def keeps(self, layer: int) -> Keeps:
        """What this layer's block keeps now."""
        calls = _CALLS[self.of_layer.get(layer, "recompute")]
        return Keeps(calls, self.clock, self.host, layer)


class BlockRetention(ActivationCheckpointing):
    """Checkpoints every block; neither ring nor experts nor what its level keeps run again."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        # No block of ours draws random numbers, and saving their state costs 5 KB a block.
        preserve_rng_state: bool = False
        levels: Levels = field(default_factory=Levels)
        # Bytes of host memory for block inputs; 0: they stay on the device.
        host_budget_bytes: int = 0

    def __init__(self, config: BlockRetention.Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        if config.host_budget_bytes:
            config.levels.host = HostInputs(config.host_budget_bytes)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        assert isinstance(self.config, BlockRetention.Config)
        assert base_fqn is not None
        keeps = functools.partial(self.config.levels.keeps, int(base_fqn.rpartition(".")[2]))
        return checkpointed(module, self.config, functools.partial(relay_checkpoint, keeps=keeps))


def checkpointed(
    module: nn.Module, config: ActivationCheckpointing.Config, checkpoint_fn: Callable[..., Any]
) -> nn.Module:
    """A whole block that is run again by `checkpoint_fn`."""
    return checkpoint_wrapper(
        module,
        checkpoint_fn=checkpoint_fn,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
        early_stop=False,  # forward hooks of a recompute run to their end
        debug=config.debug,
    )


def make_retainable(model: nn.Module, levels: Levels) -> None:
    """Let every block's attention kernel and projections be kept, and note their shapes.

    Call it before context parallelism wraps the kernel: its keys and values are then those of the
    whole sequence, gathered again in a recompute rather than kept.
    """
    for layer, block in model.get_submodule("layers").named_children():
        attention: Any = block.get_submodule("attention")
        projections = [
            module
            for name, module in attention.named_modules()
            if isinstance(module, nn.Linear) and name != "wo"
        ]
        levels.shapes[int(layer)] = AttentionShape(
            num_heads=attention.n_heads,
            out_features=attention.wo.in_features,
            projected_features=sum(linear.out_features for linear in projections),
            projection_weights=sum(linear.weight.numel() for linear in projections),
        )
        _retain(attention.inner_attention, KERNEL, num_tensors=3)
        for linear in projections:
            _retain(linear, PROJECTION, num_tensors=1)


def _retain(module: nn.Module, kind: str, *, num_tensors: int) -> None:
    """Make calls of `module`, whose first arguments are tensors, retained calls."""
    forward: Callable[..., torch.Tensor] = module.forward

    @functools.wraps(forward)
    def retained_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors, rest = args[:num_tensors], args[num_tensors:]

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            return forward(*inputs, *rest, **kwargs)

        return retained_call(kind, call, *tensors)

    module.forward = retained_forward
