"""Measured live bytes of the relay against the documented formula, and their independence of
routing."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from tests.moe.parity import local_weights
from tests.support.distributed import run_ranks, subgroup
from tests.support.moe_cases import MoeCase
from titan_relay.measure import LiveBytes
from titan_relay.moe import RelayOptions, relay_moe
from titan_relay.moe.memory import backward_memory, forward_memory, routing_peak_bytes
from titan_relay.moe.shapes import LayerShape

CPU = torch.device("cpu")
# The formula leaves out per-expert counts, the few numbers that ranks compare and scalars.
TOLERANCE = 0.02


def measure(case, group, options, fake=None):
    """Peak live bytes of forward and of backward on this rank, without parameter gradients."""
    rank = 0 if group is None else dist.get_rank(group)
    data = case.data(rank)
    inputs = [data.x_TD.requires_grad_(), data.scores_TK.requires_grad_(), data.ids_TK]
    inputs += local_weights(case, rank)
    if group is not None and fake is None:
        relay_moe(*inputs, group, options)  # makes the ring
        dist.barrier(group)
    with LiveBytes(keep_events=True) as tracker:
        with tracker.phase("forward") as forward:
            out_TD = relay_moe(*inputs, group, options)
        tracker.exclude(out_TD)
        out_TD.backward(data.dout_TD)
    backward_tracker_peak = tracker.peak_bytes_without(*(weight.grad for weight in inputs[3:]))
    return forward.peak.live_bytes, backward_tracker_peak


def expected(case, options):
    shape = LayerShape(
        case.num_ranks,
        case.num_tokens,
        case.dim,
        case.expert_dim,
        case.num_experts,
        case.top_k,
        case.dtype,
    )
    forward = forward_memory(shape, options, CPU).total_bytes
    backward = backward_memory(shape, options, CPU).total_bytes
    return max(forward, routing_peak_bytes(case.num_tokens * case.top_k)), backward


def check(case, group, options):
    forward, whole = measure(case, group, options)
    wanted_forward, wanted_backward = expected(case, options)
    assert abs(forward / wanted_forward - 1) < TOLERANCE, (case, options, forward, wanted_forward)
    wanted = max(wanted_forward, wanted_backward)
    assert abs(whole / wanted - 1) < TOLERANCE, (case, options, whole, wanted)
    return forward, whole


def _check_formula(circulate):
    for num_ranks in (1, 2, 3, 4):
        group = subgroup(range(num_ranks))
        if group is None:
            continue
        group = None if num_ranks == 1 else group
        base = MoeCase(num_ranks, num_tokens=512, dim=64, expert_dim=48, num_experts=12)
        for slices, rows, top_k in itertools.product(("auto", 3), ("auto", 37), (1, 8)):
            options = RelayOptions(circulate, num_slices=slices, max_rows_per_step=rows)
            check(replace(base, top_k=top_k), group, options)
        wide = replace(base, dim=32, expert_dim=160)
        check(wide, group, RelayOptions(circulate, num_slices=2))
        narrow = replace(base, dtype=torch.bfloat16)
        check(narrow, group, RelayOptions(circulate, num_slices=2))
        peaks = {
            check(replace(base, skew=skew), group, RelayOptions(circulate))
            for skew in ("balanced", "zipf", "one_expert")
        }
        smallest, largest = min(peaks), max(peaks)
        assert max(b / a for a, b in zip(smallest, largest, strict=True)) < 1.01, peaks
    dist.barrier()


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_live_bytes_follow_the_formula_whatever_the_routing(circulate):
    run_ranks(_check_formula, 4, circulate)


def _check_fake_tensors():
    group = subgroup([0, 1])
    for circulate in ("experts", "tokens"):
        base = MoeCase(2, num_tokens=512, dim=64, expert_dim=48, num_experts=12, top_k=4)
        for case in (base, replace(base, dtype=torch.bfloat16)):
            options = RelayOptions(circulate, num_slices=2)
            real = measure(case, group, options)
            with FakeTensorMode() as fake:
                on_fakes = measure(case, group, options, fake=fake)
            for measured, counted in zip(on_fakes, real, strict=True):
                assert abs(measured / counted - 1) < TOLERANCE, (case, options, on_fakes, real)


def test_fake_tensors_show_the_memory_of_the_real_call():
    run_ranks(_check_fake_tensors, 2)
