"""A plan in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_relay.config import degrees_of
from titan_relay.measure.step_memory import CATEGORIES
from titan_relay.titan.plan.alltoall import RoutedLayer
from titan_relay.titan.plan.changes import Change
from titan_relay.titan.plan.plan import RESERVED_SHARE, Plan
from titan_relay.titan.train.relay_setup import microbatch_tokens
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
        *(["", *_relay_lines(plan)] if plan.relay is not None else []),
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
        "tokens_per_rank": microbatch_tokens(plan.run, degrees_of(plan.run, plan.world_size)),
        "peak_bytes": plan.peak_bytes,
        "peak_phase": peak.phase,
        "peak_op": peak.op,
        "first_step_peak_bytes": plan.start.first.live_bytes,
        "settling_peak_bytes": plan.start.steady.live_bytes,
        "host_bytes": plan.memory.host_bytes,
        "worst_routing_peak_bytes": plan.worst_bytes,
        "usable_bytes": plan.usable_bytes,
        "fits": plan.fits,
        "at_peak_bytes": peak.by_category,
        "working_bytes": plan.memory.rises,
        "relay": None if plan.relay is None else _relay_json(plan),
    }


def _headline(plan: Plan) -> str:
    run, degrees = plan.run, degrees_of(plan.run, plan.world_size)
    layout = ", ".join(
        f"{name} {degree}"
        for name, degree in (
            ("dp_replicate", degrees.dp_replicate),
            ("dp_shard", degrees.dp_shard),
            ("cp", degrees.cp),
            ("tp", degrees.tp),
            ("pp", degrees.pp),
            ("ep", degrees.ep),
        )
        if degree > 1 or name == "dp_shard"
    )
    return (
        f"{run.model.family}, {run.model.num_layers} layers, through {run.relay.dispatcher}; "
        f"{plan.world_size} ranks ({layout}) on {plan.device.name}; rank {plan.rank} computes "
        f"{microbatch_tokens(run, degrees):,} tokens at a time of sequences of "
        f"{run.training.seq_len:,}"
    )


def _peak_lines(plan: Plan) -> list[str]:
    peak = plan.memory.steady
    rows = [(name, peak.by_category[name]) for name in CATEGORIES if peak.by_category[name]]
    rows += [("peak", peak.live_bytes)]
    unit, name_of_unit = _unit(plan)
    lines = [f"{'live at the peak':<28} {name_of_unit:>9}"]
    lines += [f"  {name:<26} {num_bytes / unit:9.2f}" for name, num_bytes in rows]
    first = plan.start.first.live_bytes
    return [
        *lines,
        f"The peak is in {when(peak.phase)}. Step 1, before the optimizer has its state, "
        f"peaks at {first / unit:.2f} {name_of_unit}.",
        *(_settling_line(plan) if plan.start is not plan.memory else []),
        *(_host_line(plan) if plan.memory.host_bytes else []),
    ]


def _settling_line(plan: Plan) -> list[str]:
    unit, name_of_unit = _unit(plan)
    start = plan.start.steady.live_bytes / unit
    return [
        "The first two steps, after which [attention_retention] decides by what they leave, peak "
        f"at {start:.2f} {name_of_unit}."
    ]


def _host_line(plan: Plan) -> list[str]:
    return [f"Block inputs take {in_words(plan.memory.host_bytes)} of host memory."]


def _unit(plan: Plan) -> tuple[int, str]:
    return unit_for(plan.peak_bytes)


def when(phase: str) -> str:
    """A phase in words. Example: "backward experts 3" is "layer 3's experts, backward"."""
    direction, _, rest = phase.partition(" ")
    part, _, layer = rest.partition(" ")
    if layer:
        return f"layer {layer}'s {part}, {direction}"
    return f"the {direction} {part}" if direction == "optimizer" else f"the {part}, {direction}"


def _rise_lines(plan: Plan) -> list[str]:
    rises = plan.memory.rises
    unit, name_of_unit = _unit(plan)
    rows = [(words, rises[name]) for name, words in _PARTS if rises.get(name)]
    return [
        f"{'rises above what it finds':<28} {name_of_unit:>9}",
        *(f"  {words:<26} {num_bytes / unit:9.2f}" for words, num_bytes in rows),
    ]


def _relay_lines(plan: Plan) -> list[str]:
    assert plan.relay is not None
    relay = plan.relay
    pairs = [
        (relay.forward, relay.forward_memory),
        (relay.backward, relay.backward_memory),
    ]
    lines = [f"{'relay, one layer (MiB)':<28} {'forward':>9} {'backward':>9}"]
    rows: dict[str, list[str]] = {
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
    return lines + [f"  {name:<26} {one:>9} {two:>9}" for name, (one, two) in rows.items()]


def _alltoall_lines(plan: Plan) -> list[str]:
    layer = routed_layer(plan)
    rows = (layer.balanced_rows, layer.worst_rows)
    table = {
        "rows of this rank": [f"{count:,}" for count in rows],
        "dispatched input (MiB)": [_mib(layer.dispatched_bytes(count)) for count in rows],
        "SwiGLU, 3 copies (MiB)": [_mib(layer.intermediate_bytes(count)) for count in rows],
    }
    head = f"{'all-to-all, one layer':<28} {'balanced':>11} {'worst':>11}"
    return [head, *(f"  {name:<26} {one:>11} {two:>11}" for name, (one, two) in table.items())]


def routed_layer(plan: Plan) -> RoutedLayer:
    """One of the plan's layers as the all-to-all sees it."""
    run, degrees = plan.run, degrees_of(plan.run, plan.world_size)
    narrow = not plan.device.is_cpu and run.training.mixed_precision_param == "bfloat16"
    return RoutedLayer(
        num_tokens=microbatch_tokens(run, degrees),
        top_k=run.model.moe.top_k,
        dim=run.model.dim,
        expert_dim=run.model.moe.expert_dim,
        num_experts=run.model.moe.num_experts,
        num_ranks=degrees.ep,
        itemsize=2 if narrow else 4,
    )


def _mib(num_bytes: int, decimals: int = 1) -> str:
    return f"{num_bytes / MIB:.{decimals}f}"


def _relay_json(plan: Plan) -> dict[str, Any]:
    assert plan.relay is not None
    relay = plan.relay
    return {
        direction: {
            "circulate": traffic.circulate,
            "may_turn_to_experts": relay.may_turn(traffic),
            "sent_bytes_experts": traffic.experts_bytes,
            "sent_bytes_tokens": traffic.tokens_bytes,
            "working_bytes": memory.total_bytes,
            "ring_buffer_bytes": memory.passing_bytes + memory.homeward_bytes,
        }
        for direction, traffic, memory in (
            ("forward", relay.forward, relay.forward_memory),
            ("backward", relay.backward, relay.backward_memory),
        )
    }


def _worst_line(plan: Plan) -> str:
    if plan.worst_bytes is None:
        return "The worst routing was not looked at."
    unit, name_of_unit = _unit(plan)
    worst = f"{plan.worst_bytes / unit:.2f} {name_of_unit}"
    if plan.worst_bytes == plan.peak_bytes:
        return f"The router can do what it likes: at its worst the peak is the same {worst}."
    return (
        f"If the router sends everything to this rank, the peak is {worst}, "
        f"{plan.worst_bytes / plan.peak_bytes:.2f} times as much."
    )


def _verdict(plan: Plan) -> str:
    unit, name_of_unit = _unit(plan)
    peak = f"{plan.peak_bytes / unit:.2f}"
    if plan.usable_bytes is None or plan.device.capacity_bytes is None:
        return f"Needs {peak} {name_of_unit} of tensors."
    rest = (
        f"{plan.usable_bytes / unit:.2f} {name_of_unit} "
        f"({plan.device.capacity_bytes / unit:.2f} less {RESERVED_SHARE:.0%})"
    )
    return f"FITS: {peak} of {rest}." if plan.fits else f"DOES NOT FIT: {peak} of {rest}."
