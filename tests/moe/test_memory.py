"""Measured live bytes of the relay against the documented formula, and their independence of
routing."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from tests.moe.parity import call_relay, local_weights
from tests.support.distributed import Job, run_jobs
from tests.support.moe_cases import MoeCase
from titan_relay.measure import LiveBytes
from titan_relay.moe import RelayOptions
from titan_relay.moe.memory import backward_memory, forward_memory, routing_peak_bytes
from titan_relay.moe.shapes import LayerShape

CPU = torch.device("cpu")
# The formula leaves out per-expert counts, the few numbers that ranks compare and scalars.
TOLERANCE = 0.02


def measure(group, case, options, fake=None):
    """Peak live bytes of forward and of backward on this rank, without parameter gradients."""
    rank = dist.get_rank(group)
    data = case.data(rank)
    inputs = [data.x_TD.requires_grad_(), data.scores_TK.requires_grad_(), data.ids_TK]
    inputs += local_weights(case, rank)
    if fake is None:
        call_relay(inputs, group, options)  # makes the ring
        dist.barrier(group)
    with LiveBytes(keep_events=True) as tracker:
        with tracker.phase("forward") as forward:
            out_TD = call_relay(inputs, group, options)
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


def jobs():
    """By name a case and its options."""
    for num_ranks, circulate in itertools.product((1, 2, 3, 4), ("experts", "tokens")):
        where = f"{circulate}, {num_ranks} ranks"
        base = MoeCase(num_ranks, num_tokens=512, dim=64, expert_dim=48, num_experts=12)
        for slices, rows, top_k in itertools.product(("auto", 3), ("auto", 37), (1, 8)):
            options = RelayOptions(circulate, num_slices=slices, max_rows_per_step=rows)
            name = f"{where}, {slices} slices, {rows} rows, top-{top_k}"
            yield name, (replace(base, top_k=top_k), options)
        wide = replace(base, dim=32, expert_dim=160)
        yield f"{where}, wide", (wide, RelayOptions(circulate, num_slices=2))
        narrow = replace(base, dtype=torch.bfloat16)
        yield f"{where}, bfloat16", (narrow, RelayOptions(circulate, num_slices=2))
        for skew in ROUTINGS:
            yield f"{where}, {skew}", (replace(base, skew=skew), RelayOptions(circulate))


ROUTINGS = ("balanced", "zipf", "one_expert")
JOBS = dict(jobs())
ON_FAKES = {
    f"{circulate}, {dtype}": (
        MoeCase(2, num_tokens=512, dim=64, expert_dim=48, num_experts=12, top_k=4, dtype=dtype),
        RelayOptions(circulate, num_slices=2),
    )
    for circulate in ("experts", "tokens")
    for dtype in (torch.float32, torch.bfloat16)
}


def measure_on_fakes(group, case, options):
    real = measure(group, case, options)
    with FakeTensorMode() as fake:
        return measure(group, case, options, fake=fake), real


@pytest.fixture(scope="module")
def peaks():
    """By name of each rank the peaks of forward and backward."""
    todo = {name: Job(job[0].num_ranks, measure, job) for name, job in JOBS.items()}
    todo |= {name: Job(2, measure_on_fakes, job) for name, job in ON_FAKES.items()}
    return run_jobs(todo, 4)


@pytest.mark.parametrize("name", JOBS)
def test_live_bytes_follow_the_formula(name, peaks):
    wanted_forward, wanted_backward = expected(*JOBS[name])
    for forward, whole in peaks[name]:
        assert forward == pytest.approx(wanted_forward, rel=TOLERANCE)
        assert whole == pytest.approx(max(wanted_forward, wanted_backward), rel=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_live_bytes_do_not_depend_on_the_routing(circulate, num_ranks, peaks):
    by_skew = [peaks[f"{circulate}, {num_ranks} ranks, {skew}"] for skew in ROUTINGS]
    for of_rank in zip(*by_skew, strict=True):
        smallest, largest = min(of_rank), max(of_rank)
        assert max(b / a for a, b in zip(smallest, largest, strict=True)) < 1.01, of_rank


@pytest.mark.parametrize("name", ON_FAKES)
def test_fake_tensors_show_the_memory_of_the_real_call(name, peaks):
    for on_fakes, real in peaks[name]:
        assert on_fakes == pytest.approx(real, rel=TOLERANCE)
