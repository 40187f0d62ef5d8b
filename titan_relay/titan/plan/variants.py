"""Ways to run the same model that are compared for length and speed."""

from __future__ import annotations

from typing import Any

from titan_relay.config import RunConfig
from titan_relay.titan.plan.changes import with_settings

_ALLTOALL = {"relay.dispatcher": "alltoall", "attention_retention.mode": "recompute"}
_RELAY = {"relay.dispatcher": "relay", "activation_checkpoint.mode": "none"}

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall-full-recompute": _ALLTOALL | {"activation_checkpoint.mode": "full"},
    "alltoall-selective": _ALLTOALL | {"activation_checkpoint.mode": "selective"},
    "relay-recompute": _RELAY | {"attention_retention.mode": "recompute"},
}
BASELINE = "alltoall-full-recompute"


def variant_of(run: RunConfig, name: str) -> RunConfig:
    """The run as the variant would do it."""
    return with_settings(run, VARIANTS[name])
