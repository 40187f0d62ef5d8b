"""A plan in words and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_relay.config import degrees_of
from titan_relay.config.degrees import microbatch_tokens
from titan_relay.measure.devices import RESERVED_SHARE
from titan_relay.titan.plan.alltoall import worst_rows
from titan_relay.titan.plan.changes import Change
from titan_relay.titan.plan.plan import Plan
from titan_relay.titan.train.relay_setup import ExpectedRelay, relay_shape
from titan_relay.units import MIB, in_words, unit_for

# Parts whose working memory is worth a line, in the order of a step.
_PARTS = (
    ("forward attention", "attention, forward"),
    ("forward experts", "experts, forward"),
    ("forward dense", "dense feed-forward, forward"),
    ("forward loss", "logits and loss"),
    ("backward block", "a whole block, backward"),
    ("optimizer step", "optimizer"),
)


def plan_lines(plan: Plan, changes: Sequence[Change] = ()) -> list[str]:
    """The whole plan and what would change its verdict, a line an element."""
    return [
        _headline(plan),
        "",
        *_peak_lines(plan),
        "",
        *_rise_lines(plan),
        *(["", *_relay_lines(plan.relay)] if plan.relay is not None else []),
        *(["", *_alltoall_lines(plan)] if plan.run.relay.dispatcher == "alltoall" else []),
        "",
        _worst_line(plan),
        _verdict(plan),
        *(["Changes that lower the peak:"] if changes else []),
        *(f"  {change.line()}" for change in changes),
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes throughout."""
    peak = plan.memory.steady
    return {
        "device": plan.device.name,
        "world_size": plan.world_size,
        "rank": plan.rank,
        "seq_len": plan.run.training.seq_len,
        "tokens_per_rank": _microbatch_tokens(plan),
        "peak_bytes": plan.peak_bytes,
        "peak_phase": peak.phase,
        "peak_op": peak.op,
        "first_step_peak_bytes": plan.start.first.live_bytes,
        "settling_peak_bytes": plan.start.steady.live_bytes,
        "host_bytes": plan.memory.host_bytes,
        "worst_routing_peak_bytes": plan.worst_bytes,
        "usable_bytes": plan.device.usable_bytes,
        "fits": plan.fits,
        "at_peak_bytes": peak.by_category,
        "working_bytes": plan.memory.rises,
        "relay": None if plan.relay is None else _relay_json(plan.relay),
    }


def _headline(plan: Plan) -> str:
    run, degrees = plan.run, degrees_of(plan.run, plan.world_size)
    layout = ", ".join(
        f"{name} {getattr(degrees, name)}"
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        if getattr(degrees, name) > 1 or name == "dp_shard"
    )
    return (
        f"{run.model.family}, {run.model.num_layers} layers, through {run.relay.dispatcher}; "
        f"{plan.world_size} ranks ({layout}) on {plan.device.name}; rank {plan.rank} computes "
        f"{_microbatch_tokens(plan):,} tokens at a time of sequences of "
        f"{run.training.seq_len:,}"
    )


def _peak_lines(plan: Plan) -> list[str]:
    peak = plan.memory.steady
    rows = {name: num_bytes for name, num_bytes in peak.by_category.items() if num_bytes}
    lines = [
        *_bytes_table(plan, "live at the peak", rows | {"peak": peak.live_bytes}),
        f"The peak is in {when(peak.phase)}. Step 1, before the optimizer has its state, "
        f"peaks at {_words(plan, plan.start.first.live_bytes)}.",
    ]
    if plan.start is not plan.memory:
        lines.append(
            "The first two steps, after which [attention_retention] decides by what they leave, "
            f"peak at {_words(plan, plan.start.steady.live_bytes)}."
        )
    if plan.memory.host_bytes:
        lines.append(f"Block inputs take {in_words(plan.memory.host_bytes)} of host memory.")
    return lines


def when(phase: str) -> str:
    """A phase in words. Example: "backward experts 3" is "layer 3's experts, backward"."""
    direction, _, rest = phase.partition(" ")
    part, _, layer = rest.partition(" ")
    if layer:
        return f"layer {layer}'s {part}, {direction}"
    return f"the {direction} {part}" if direction == "optimizer" else f"the {part}, {direction}"


def _rise_lines(plan: Plan) -> list[str]:
    rises = plan.memory.rises
    rows = {words: rises[name] for name, words in _PARTS if rises.get(name)}
    return _bytes_table(plan, "rises above what it finds", rows)


def _relay_lines(relay: ExpectedRelay) -> list[str]:
    pairs = list(relay.directions.values())
    rows = {
        "circulating": [
            "either" if relay.may_turn(traffic) else str(traffic.circulate) for traffic, _ in pairs
        ],
        "sent if experts circulate": [_mib(traffic.experts_bytes, 2) for traffic, _ in pairs],
        "sent if tokens circulate": [_mib(traffic.tokens_bytes, 2) for traffic, _ in pairs],
        "results": [_mib(memory.result_bytes) for _, memory in pairs],
        "ring buffers": [_mib(m.passing_bytes + m.homeward_bytes) for _, m in pairs],
        "step": [_mib(memory.step_bytes) for _, memory in pairs],
        "routing": [_mib(memory.routing_bytes) for _, memory in pairs],
        "working memory": [_mib(memory.total_bytes) for _, memory in pairs],
    }
    return _table("relay, one layer (MiB)", list(relay.directions), rows)


def _alltoall_lines(plan: Plan) -> list[str]:
    shape = relay_shape(plan.run, plan.world_size, for_cpu=plan.device.is_cpu)
    # Not `shape.num_tokens`: `relay.max_tokens_per_rank` is nothing to the all-to-all.
    balanced = _microbatch_tokens(plan) * shape.top_k
    worst = worst_rows(balanced, shape.num_ranks, shape.top_k, shape.num_local_experts)
    rows, itemsize = (balanced, worst), shape.dtype.itemsize
    table = {
        "rows of this rank": [f"{count:,}" for count in rows],
        "dispatched input (MiB)": [_mib(count * shape.dim * itemsize) for count in rows],
        "SwiGLU, 3 copies (MiB)": [_mib(3 * count * shape.expert_dim * itemsize) for count in rows],
    }
    return _table("all-to-all, one layer", ["balanced", "worst"], table, width=11)


def _bytes_table(plan: Plan, head: str, rows: Mapping[str, int]) -> list[str]:
    unit, name_of_unit = unit_for(plan.peak_bytes)
    numbers = {name: [f"{num_bytes / unit:.2f}"] for name, num_bytes in rows.items()}
    return _table(head, [name_of_unit], numbers)


def _table(
    head: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]], width: int = 9
) -> list[str]:
    lines = [(f"{head:<28}", columns), *((f"  {name:<26}", row) for name, row in rows.items())]
    return [" ".join([name, *(f"{cell:>{width}}" for cell in row)]) for name, row in lines]


def _words(plan: Plan, num_bytes: int) -> str:
    """In the unit of the plan's peak, so that all its numbers compare."""
    unit, name_of_unit = unit_for(plan.peak_bytes)
    return f"{num_bytes / unit:.2f} {name_of_unit}"


def _mib(num_bytes: int, decimals: int = 1) -> str:
    return f"{num_bytes / MIB:.{decimals}f}"


def _microbatch_tokens(plan: Plan) -> int:
    return microbatch_tokens(plan.run, degrees_of(plan.run, plan.world_size))


def _relay_json(relay: ExpectedRelay) -> dict[str, Any]:
    return {
        direction: {
            "circulate": traffic.circulate,
            "may_turn_to_experts": relay.may_turn(traffic),
            "sent_bytes_experts": traffic.experts_bytes,
            "sent_bytes_tokens": traffic.tokens_bytes,
            "working_bytes": memory.total_bytes,
            "ring_buffer_bytes": memory.passing_bytes + memory.homeward_bytes,
        }
        for direction, (traffic, memory) in relay.directions.items()
    }


def _worst_line(plan: Plan) -> str:
    if plan.worst_bytes is None:
        return "The worst routing was not looked at."
    worst = _words(plan, plan.worst_bytes)
    if plan.worst_bytes == plan.peak_bytes:
        return f"The router can do what it likes: at its worst the peak is the same {worst}."
    return (
        f"If the router sends everything to this rank, the peak is {worst}, "
        f"{plan.worst_bytes / plan.peak_bytes:.2f} times as much."
    )


def _verdict(plan: Plan) -> str:
    unit, _ = unit_for(plan.peak_bytes)
    usable_bytes, capacity_bytes = plan.device.usable_bytes, plan.device.capacity_bytes
    if usable_bytes is None or capacity_bytes is None:
        return f"Needs {_words(plan, plan.peak_bytes)} of tensors."
    return (
        f"{'FITS' if plan.fits else 'DOES NOT FIT'}: {plan.peak_bytes / unit:.2f} of "
        f"{_words(plan, usable_bytes)} ({capacity_bytes / unit:.2f} less {RESERVED_SHARE:.0%})."
    )
