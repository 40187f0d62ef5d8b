"""The nearest changes to a configuration that make it fit a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from titan_relay.config import (
    ConfigError,
    Origins,
    RunConfig,
    check_keys,
    degrees_of,
    with_settings,
)
from titan_relay.config.degrees import global_batch_size, loss_chunks
from titan_relay.measure.devices import Device
from titan_relay.titan.plan.extrapolate import Moment, peak_of
from titan_relay.units import in_words

_Proposal = Callable[[RunConfig, int], dict[str, Any]]
_by_peak = attrgetter("peak_bytes")

_WORTHWHILE = 0.99  # of the peak before
_MOST_CHANGES = 3
_MOST_HALVINGS = 4  # of the sequence, on top
_HOST_GIB = 64.0  # of a rank: half a TiB over the 8 GPUs of a machine


@dataclass(frozen=True)
class Change:
    """Keys to set (as on the command line), and the peak that they give."""

    settings: dict[str, Any]
    peak_bytes: int
    fits: bool

    def line(self) -> str:
        """The change and its effect in one line."""
        flags = " ".join(f"--{key} {_argument(value)}" for key, value in self.settings.items())
        verdict = "fits" if self.fits else "does not fit"
        return f"{flags}: peak {in_words(self.peak_bytes)}, {verdict}"


def _argument(value: Any) -> str:
    """A value as the command line takes it."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def nearest_changes(
    run: RunConfig,
    world_size: int,
    device: Device,
    peak_bytes: int,
    *,
    rank: int = 0,
    skew: float = 1.0,
    peak_of: Callable[..., Moment] = peak_of,
) -> list[Change]:
    """Every single change that lowers the peak, now `peak_bytes`, by 1% or more: those that leave
    the training as it is first, the lowest peak first. If none of these fits, also a combination
    of them, with a shorter sequence where that is not enough.

    Peaks are those of `peak_of`, which extrapolates from few layers; see `dry_run` for `rank` and
    `skew`.
    """
    limit = device.usable_bytes
    assert limit is not None, "a device without a limit needs no changes"

    def peaks(
        settings: dict[str, Any], proposals: Sequence[_Proposal], below_bytes: int
    ) -> Iterator[Change]:
        changed = with_settings(run, settings)
        for propose in proposals:
            proposal = propose(changed, world_size)
            candidate = with_settings(changed, proposal)
            if not proposal or not _is_valid(candidate, world_size):
                continue
            peak = peak_of(candidate, world_size, device, rank=rank, skew=skew).live_bytes
            if peak <= below_bytes * _WORTHWHILE:
                yield Change(settings | proposal, peak, peak <= limit)

    alike = sorted(peaks({}, _PROPOSALS, peak_bytes), key=_by_peak)
    shorter = list(peaks({}, [_half_sequence], peak_bytes))
    singles = [*alike, *shorter]
    if any(change.fits for change in alike):
        return singles
    best = alike[0] if alike else Change({}, peak_bytes, fits=False)
    for number in range(1, _MOST_CHANGES + _MOST_HALVINGS):
        proposals = _PROPOSALS if number < _MOST_CHANGES else [_half_sequence]
        more = peaks(best.settings, proposals, best.peak_bytes)
        best = min(more, key=_by_peak, default=best)
        if best.fits:
            break
    known = [change.settings for change in singles]
    return singles if best.settings in ({}, *known) else [*singles, best]


def _is_valid(run: RunConfig, world_size: int) -> bool:
    try:
        check_keys(run, world_size, Origins("proposal"), files=False)
    except ConfigError:
        return False
    return True


def _more_context_parallelism(run: RunConfig, world_size: int) -> dict[str, Any]:
    cp = 2 * run.parallelism.context_parallel_degree
    changes: dict[str, Any] = {"parallelism.context_parallel_degree": cp}
    shard = run.parallelism.data_parallel_shard_degree
    if shard > 1:
        changes["parallelism.data_parallel_shard_degree"] = shard // 2
    batch = degrees_of(run, world_size).batch
    return changes | _same_global_batch(run, world_size) if batch % 2 == 0 else {}


def _more_expert_parallelism(run: RunConfig, world_size: int) -> dict[str, Any]:
    return {"parallelism.expert_parallel_degree": 2 * run.parallelism.expert_parallel_degree}


def _smaller_batch(run: RunConfig, world_size: int) -> dict[str, Any]:
    batch = run.training.local_batch_size
    if batch % 2:
        return {}
    return {"training.local_batch_size": batch // 2} | _same_global_batch(run, world_size)


def _same_global_batch(run: RunConfig, world_size: int) -> dict[str, Any]:
    """What the default makes of the other keys, now that one of them changes."""
    if run.training.global_batch_size != -1:
        return {}
    return {"training.global_batch_size": global_batch_size(run, world_size)}


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
    if retention.layers is not None:
        least = ("recompute",) * len(retention.layers)
        return {"attention_retention.layers": least} if retention.layers != least else {}
    if retention.mode == "auto":
        return {"attention_retention.budget_gib": 0.0} if retention.budget_gib != 0 else {}
    if retention.mode != "recompute":
        return {"attention_retention.mode": "recompute"}
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


# Those that leave the training as it is.
_PROPOSALS: tuple[_Proposal, ...] = (
    _relay,
    _full_recompute,
    _smaller_batch,
    _less_kept,
    _more_slices,
    _chunked_loss,
    _more_context_parallelism,
    _more_expert_parallelism,
)
