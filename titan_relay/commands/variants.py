"""Ways to run the same model that are compared for length and speed, and their option."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from titan_relay.config import RunConfig, load_config, with_length, with_settings
from titan_relay.config.schema import AttentionRetentionConfig
from titan_relay.validate import validate

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


def variant_names(text: str) -> list[str]:
    """Names between commas, as the type of an argument."""
    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is there twice")
    return names


def runs_of(
    names: Iterable[str],
    config: str,
    keys: Sequence[str],
    world_size: int,
    seq_len: int | None = None,
) -> dict[str, RunConfig]:
    """The run of a file as each variant would do it, valid; with `seq_len` also as one sequence so
    long.

    Raises:
        ConfigError: one line that names the key, its value and its place.
    """
    loaded = load_config(["--config", config, *keys])
    origins, stages = loaded.origins, loaded.config.parallelism.pipeline_parallel_degree
    if stages > 1:
        raise origins.error(
            "parallelism.pipeline_parallel_degree",
            stages,
            "must be 1 here: one sequence at a time makes no microbatches for a pipeline",
        )
    runs = {name: with_settings(loaded.config, VARIANTS[name]) for name in names}
    for run in runs.values():
        validate(run, world_size, origins, files=False)
        if seq_len is not None:
            validate(with_length(run, seq_len), world_size, origins, files=False)
    return runs
