"""`[activation_checkpoint]`: which of torchtitan's policies, and what the relay adds to them."""

from __future__ import annotations

from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)

from titan_relay.config.schema import ActivationCheckpointConfig


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
        return SelectiveAC.Config(**common)
    if section.mode == "full":
        return FullAC.Config(**common)
    return MemoryBudgetAC.Config(
        **common,
        memory_budget=section.memory_budget,
        visualize_memory_budget_pareto=section.visualize_memory_budget_pareto,
    )
