"""Ways to run the same model that are compared for length and speed."""

from __future__ import annotations

from typing import Any

from titan_relay.config import RunConfig
from titan_relay.config.schema import AttentionRetentionConfig
from titan_relay.titan.plan.changes import with_settings

HOST_GIB = 128.0  # of a rank: 1 TiB over the 8 GPUs of a machine

# What an all-to-all has no use for; a run that says it for its relay can still be compared.
_RELAY_ONLY = {
    "relay.deterministic": False,
    "attention_retention": AttentionRetentionConfig(mode="recompute"),
}
_ALLTOALL = {"relay.dispatcher": "alltoall", **_RELAY_ONLY}
_RELAY = {
    "relay.dispatcher": "relay",
    "activation_checkpoint.mode": "none",
    "attention_retention": AttentionRetentionConfig(mode="recompute"),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall-full-recompute": _ALLTOALL | {"activation_checkpoint.mode": "full"},
    "alltoall-selective": _ALLTOALL | {"activation_checkpoint.mode": "selective"},
    "relay-recompute": _RELAY,
    # At the longest sequence there is nothing left to spend on attention.
    "relay-retain-auto": _RELAY
    | {"attention_retention.mode": "auto", "attention_retention.budget_gib": 0.0},
    "relay-host": _RELAY
    | {
        "attention_retention.block_inputs": "host",
        "attention_retention.host_budget_gib": HOST_GIB,
    },
}
BASELINE = "alltoall-full-recompute"


def variant_of(run: RunConfig, name: str) -> RunConfig:
    """The run as the variant would do it."""
    return with_settings(run, VARIANTS[name])
