"""Ways to run the same model that are compared for length and speed."""

from __future__ import annotations

from typing import Any

from titan_relay.config import RunConfig
from titan_relay.titan.plan.changes import with_settings

HOST_GIB = 128.0  # of a rank: 1 TiB over the 8 GPUs of a machine
_ALLTOALL = {"relay.dispatcher": "alltoall", "attention_retention.mode": "recompute"}
_RELAY = {"relay.dispatcher": "relay", "activation_checkpoint.mode": "none"}

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall-full-recompute": _ALLTOALL | {"activation_checkpoint.mode": "full"},
    "alltoall-selective": _ALLTOALL | {"activation_checkpoint.mode": "selective"},
    "relay-recompute": _RELAY | {"attention_retention.mode": "recompute"},
    # At the longest sequence there is nothing left to spend on attention.
    "relay-retain-auto": _RELAY
    | {"attention_retention.mode": "auto", "attention_retention.budget_gib": 0.0},
    "relay-host": _RELAY
    | {
        "attention_retention.mode": "recompute",
        "attention_retention.block_inputs": "host",
        "attention_retention.host_budget_gib": HOST_GIB,
    },
}
BASELINE = "alltoall-full-recompute"


def variant_of(run: RunConfig, name: str) -> RunConfig:
    """The run as the variant would do it."""
    return with_settings(run, VARIANTS[name])
