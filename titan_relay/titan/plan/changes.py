"""The nearest changes to a configuration that make it fit a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from titan_relay.config import ConfigError, RunConfig, degrees_of, validate
from titan_relay.config.loss_chunks import loss_chunks
from titan_relay.memory.devices import Device
from titan_relay.titan.plan.extrapolate import peak_of
from titan_relay.titan.plan.plan import usable_bytes

_MOST_CHANGES = 3
_HOST_GIB = 64.0  # of a rank: half a TiB over the 8 GPUs of a machine


def unit_for(peak_bytes: int) -> tuple[int, str]:
    """GiB, or MiB for a plan that would be all zeros in GiB."""
    return (2**30, "GiB") if peak_bytes >= 2**30 else (2**20, "MiB")


@dataclass(frozen=True)
class Change:
    """Keys to set (as on the command line), and the peak that they give."""

    settings: dict[str, Any]
    peak_bytes: int
    fits: bool

    def line(self) -> str:
        """The change and its effect in one line."""
        flags = " ".join(f"--{key} {value}" for key, value in self.settings.items())
        verdict = "fits" if self.fits else "does not fit"
        unit, name = unit_for(self.peak_bytes)
        return f"{flags}: peak {self.peak_bytes / unit:.2f} {name}, {verdict}"


def nearest_changes(
    run: RunConfig, world_size: int, device: Device, peak_bytes: int
) -> list[Change]:
    """Every single change that lowers the peak, now `peak_bytes`, smallest first; and if none of
    them fits, the first combination that does, made of the best change at each turn.

    Peaks are those of rank 0 under balanced routing, extrapolated from few layers.
    """
    limit = usable_bytes(device)
    assert limit is not None, "a device without a limit needs no changes"
    changes = [
        Change(settings, peak, peak <= limit)
        for settings, peak in _peaks(run, {}, world_size, device)
        if peak < peak_bytes
    ]
    changes.sort(key=lambda change: change.peak_bytes)
    if not changes or changes[0].fits:
        return changes
    best = changes[0]
    for _ in range(_MOST_CHANGES - 1):
        more = [
            Change(settings, peak, peak <= limit)
            for settings, peak in _peaks(run, best.settings, world_size, device)
        ]
        if not more:
            break
        best = min(more, key=lambda change: change.peak_bytes)
        if best.fits:
            break
    return [*changes, best] if best is not changes[0] else changes


def _peaks(
    run: RunConfig, settings: dict[str, Any], world_size: int, device: Device
) -> Iterator[tuple[dict[str, Any], int]]:
    """Each valid single change on top of `settings`, with the peak it gives."""
    changed = with_settings(run, settings)
    for propose in _PROPOSALS:
        proposal = propose(changed, world_size)
        if not proposal:
            continue
        candidate = with_settings(changed, proposal)
        try:
            validate(candidate, world_size, "proposal", files=False)
        except ConfigError:
            continue
        yield settings | proposal, peak_of(candidate, world_size, device).live_bytes


def with_settings(run: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """The configuration with keys such as "training.seq_len" set."""
    for path, value in settings.items():
        run = _with(run, path.split("."), value)
    return run


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _with(getattr(section, name), rest, value)
    return replace(section, **{name: value})


def _more_context_parallelism(run: RunConfig, world_size: int) -> dict[str, Any]:
    cp = 2 * run.parallelism.context_parallel_degree
    changes: dict[str, Any] = {"parallelism.context_parallel_degree": cp}
    shard = run.parallelism.data_parallel_shard_degree
    if shard > 1:
        changes["parallelism.data_parallel_shard_degree"] = shard // 2
    batch = degrees_of(run, world_size).batch
    return changes if batch % 2 == 0 else {}


def _more_expert_parallelism(run: RunConfig, world_size: int) -> dict[str, Any]:
    return {"parallelism.expert_parallel_degree": 2 * run.parallelism.expert_parallel_degree}


def _smaller_batch(run: RunConfig, world_size: int) -> dict[str, Any]:
    batch = run.training.local_batch_size
    return {"training.local_batch_size": batch // 2} if batch > 1 and batch % 2 == 0 else {}


def _relay(run: RunConfig, world_size: int) -> dict[str, Any]:
    if run.relay.dispatcher == "relay":
        return {}
    return {"relay.dispatcher": "relay", "activation_checkpoint.mode": "none"}


def _full_recompute(run: RunConfig, world_size: int) -> dict[str, Any]:
    if run.relay.dispatcher == "relay" or run.activation_checkpoint.mode == "full":
        return {}
    return {"activation_checkpoint.mode": "full"}


def _less_kept(run: RunConfig, world_size: int) -> dict[str, Any]:
    if run.relay.dispatcher != "relay":
        return {}
    retention = run.attention_retention
    if retention.layers is not None or retention.mode != "recompute":
        return {"attention_retention.mode": "recompute", "attention_retention.layers": None}
    host = {
        "attention_retention.block_inputs": "host",
        "attention_retention.host_budget_gib": _HOST_GIB,
    }
    return host if retention.block_inputs == "device" else {}


def _more_slices(run: RunConfig, world_size: int) -> dict[str, Any]:
    ep = run.parallelism.expert_parallel_degree
    if run.relay.dispatcher != "relay" or ep == 1:
        return {}
    num_local = run.model.moe.num_experts // ep
    num_slices = run.relay.num_slices
    return {"relay.num_slices": num_local if num_slices == "auto" else 2 * num_slices}


def _chunked_loss(run: RunConfig, world_size: int) -> dict[str, Any]:
    if run.loss.name == "chunked_cross_entropy":
        return {"loss.num_chunks": 2 * loss_chunks(run, degrees_of(run, world_size))}
    return {"loss.name": "chunked_cross_entropy"}


def _half_sequence(run: RunConfig, world_size: int) -> dict[str, Any]:
    seq_len = run.training.seq_len
    return {"training.seq_len": seq_len // 2} if seq_len % 2 == 0 else {}


_PROPOSALS: tuple[Callable[[RunConfig, int], dict[str, Any]], ...] = (
    _relay,
    _full_recompute,
    _smaller_batch,
    _less_kept,
    _more_slices,
    _chunked_loss,
    _more_context_parallelism,
    _more_expert_parallelism,
    _half_sequence,
)
