"""`[activation_checkpoint]`: torchtitan's policies, and what the relay and the router add to them.

A recompute never decides again which experts a token goes to: the chosen ids are saved (8 bytes and
the score a copy), because a choice between near-equal logits may come out differently the second
time, and then gradients belong to other experts than the output did. Nor does it run the ring
again; see `titan_relay.recompute.relay_checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    MemoryBudgetAC,
    SelectiveAC,
)

from titan_relay.config.schema import ActivationCheckpointConfig
from titan_relay.moe import relay_ops
from titan_relay.recompute import relay_checkpoint
from titan_relay.titan.recompute.block_levels import checkpointed


class RelayFullAC(ActivationCheckpointing):
    """Recomputes whole blocks, but neither the choice of experts nor the relay."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return checkpointed(module, self.config, relay_checkpoint)


class RelaySelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing that saves the relay's output like other costly ops."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """The ops whose outputs are saved."""
        return super().get_save_ops() | set(relay_ops())


def build_activation_checkpoint(
    section: ActivationCheckpointConfig,
) -> ActivationCheckpointing.Config | None:
    """The torchtitan policy of a mode; None for "none"."""
    common = {
        "preserve_rng_state": section.preserve_rng_state,
        "determinism_check": section.determinism_check,
        "debug": section.debug,
    }
    if section.mode == "none":
        return None
    if section.mode == "selective":
        return RelaySelectiveAC.Config(**common)
    if section.mode == "full":
        return RelayFullAC.Config(**common)
    return MemoryBudgetAC.Config(
        **common,
        memory_budget=section.memory_budget,
        visualize_memory_budget_pareto=section.visualize_memory_budget_pareto,
    )
