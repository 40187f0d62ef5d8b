"""Plans tell the truth: the dry run on fake tensors against what real ranks allocate."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, a_run, config_file, layout, load_run
from titan_relay.config import RunConfig, load_config
from titan_relay.measure.devices import device_named
from titan_relay.measure.step_memory import Category, StepMemory

MIB = 2**20
CPU, H100 = device_named("cpu"), device_named("h100-80g")
# torchtitan routes evenly on demand; what the all-to-all receives is then what a plan assumes.
ALLTOALL = {"relay__dispatcher": "alltoall", "debug__moe_force_load_balance": True}
RUNS = [
    a_run("experts circulate", **layout(dp=2, ep=2), relay__circulate="experts"),
    a_run("tokens circulate, cp 2", **layout(cp=2, ep=2), relay__circulate="tokens"),
    a_run("accumulation", **layout(dp=2) | {"training__local_batch_size": 1}),
    a_run("all-to-all", **layout(dp=2, ep=2), **ALLTOALL),
    a_run("all-to-all, full", **layout(dp=2, ep=2), **ALLTOALL, activation_checkpoint__mode="full"),
    a_run("chunked loss", **layout(dp=2, ep=2), loss__name="chunked_cross_entropy"),
]


def measure(folder: str, runs: list[Run]) -> dict[str, tuple[int, int]]:
    """On real ranks: the peaks of a first and of a later step of this rank, by run.

    The lower of two runs and of two steps each: a thread of gloo may hold a buffer for longer.
    """
    from titan_relay.titan.plan.measure import measure_steps

    peaks = {}
    for run in runs:
        config = load_run(Path(folder), run)
        tries = [measure_steps(config, dist.get_world_size(), num_steps=3) for _ in range(2)]
        peaks[run.name] = (
            min(steps[0].first.live_bytes for steps in tries),
            min(step.first.live_bytes for steps in tries for step in steps[1:]),
        )
    return peaks


def without_group(function: Any, *args: Any) -> Any:
    """Run something that needs a process without a process group, in a test's rank."""
    dist.destroy_process_group()
    result = function(*args)
    rendezvous = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    return result


def predict(folder: str, runs: list[Run], world_size: int) -> dict[str, StepMemory]:
    """Dry runs of rank 0."""
    from titan_relay.titan.plan.dry_run import dry_run

    return {run.name: dry_run(load_run(Path(folder), run), world_size, CPU) for run in runs}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[StepMemory, tuple]]:
    """What was predicted and what was measured of every run, by its name."""
    folder = tmp_path_factory.mktemp("peaks")
    config_file(folder)
    predicted = run_ranks(without_group, 1, predict, str(folder), RUNS, 2, timeout_s=600)[0]
    measured = run_ranks(measure, 2, str(folder), RUNS, timeout_s=600)[0]
    return {name: (predicted[name], measured[name]) for name in predicted}


@pytest.mark.parametrize("name", [run.name for run in RUNS])
def test_predicted_peaks_are_those_of_real_ranks(
    name: str, peaks: dict[str, tuple[StepMemory, tuple]]
) -> None:
    memory, measured = peaks[name]
    # The same trainer on the same shapes. What differs are token ids: a dry run has those of
    # two microbatches, this run those of four, 3 kB of half a MiB.
    predicted = (memory.first.live_bytes, memory.steady.live_bytes)
    assert predicted == pytest.approx(measured, rel=0.007)


def looks(folder: str) -> dict[str, Any]:
    """What dry runs say about other devices, routings and depths."""
    from titan_relay.titan.plan.changes import nearest_changes
    from titan_relay.titan.plan.dry_run import dry_run
    from titan_relay.titan.plan.extrapolate import peak_of
    from titan_relay.titan.plan.plan import plan_run
    from titan_relay.titan.plan.report import plan_json, plan_lines

    path = Path(folder)
    alltoall = load_run(path, a_run("", **layout(dp=4, ep=4), **ALLTOALL))
    relay = load_run(path, a_run("", **layout(dp=4, ep=4)))
    deep = replace(relay, model=replace(relay.model, num_layers=14))
    dense_first = _dense_first()
    small = device_named(str(3 / 1024))
    plan = plan_run(relay, 4, H100)
    tight = device_named(str(plan.peak_bytes * 1.3 / 2**30))  # of which 10% stay free
    on_host = {"block_inputs": "auto", "host_budget_gib": 1.0}
    return {
        "tight": tight,
        "auto": {
            name: plan_run(
                replace(relay, attention_retention=replace(relay.attention_retention, **keys)),
                4,
                tight,
            )
            for name, keys in {
                "levels": {"mode": "auto"},
                "levels at most": {"mode": "auto", "budget_gib": 0.001},
                "inputs": on_host,
                "both": on_host | {"mode": "auto"},
            }.items()
        },
        "balanced": dry_run(alltoall, 4, CPU).steady.live_bytes,
        "worst": dry_run(alltoall, 4, CPU, skew=math.inf).steady.live_bytes,
        "relay at worst": dry_run(relay, 4, CPU, skew=math.inf).steady.live_bytes,
        "relay": dry_run(relay, 4, CPU).steady.live_bytes,
        "deep": dry_run(deep, 4, CPU).steady.live_bytes,
        "deep, from shallow": peak_of(deep, 4, CPU).live_bytes,
        "dense first": dry_run(dense_first, 4, CPU).steady,
        "dense first, from shallow": peak_of(dense_first, 4, CPU),
        "lines": plan_lines(plan),
        "json": plan_json(plan),
        "changes": nearest_changes(alltoall, 4, small, 2**40),
        "priced": {ep: _kept_by_experts(path, ep) for ep in (1, 8)},
    }


def _dense_first() -> RunConfig:
    """Three dense blocks, then eleven whose experts make the peak."""
    config = Path(__file__).parents[3] / "train_configs" / "glm47_flash_tiny.toml"
    settings = {
        "model.num_layers": "14",
        "model.num_dense_layers": "3",
        "model.moe.expert_dim": "256",
        "loss.name": "chunked_cross_entropy",
        "loss.num_chunks": "8",
        "relay.dispatcher": "alltoall",
        "activation_checkpoint.mode": "full",
        "parallelism.expert_parallel_degree": "2",
        "debug.moe_force_load_balance": "true",
    }
    keys = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return load_config(["--config", str(config), *keys]).config


def _kept_by_experts(path: Path, ep: int) -> int:
    """Bytes that one all-to-all layer keeps, of 4096 tokens, D 2048, F 1024, top-8, bfloat16."""
    from titan_relay.titan.plan.dry_run import dry_run

    settings = {
        "model__dim": 2048,
        "model__num_layers": 1,
        "model__moe__num_experts": 32,
        "model__moe__top_k": 8,
        "model__moe__expert_dim": 1024,
        "model__max_seq_len": 4096,
        "training__seq_len": 4096,
        "training__local_batch_size": 1,
    }
    run = load_run(path, a_run("", **layout(dp=8, ep=ep) | settings, **ALLTOALL))
    memory = dry_run(run, 8, H100)
    kept = [point.by_category for point in memory.curve if point.phase.startswith("forward loss")]
    return max(point[Category.KEPT_EXPERTS] for point in kept)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plan")
    config_file(folder)
    result: dict[str, Any] = run_ranks(without_group, 1, looks, str(folder), timeout_s=600)[0]
    return result


@pytest.mark.parametrize("name", ["levels", "inputs", "both"])
def test_plans_of_auto_spend_what_the_device_leaves(name: str, seen: dict[str, Any]) -> None:
    plan, limit = seen["auto"][name], seen["tight"].capacity_bytes * 0.9
    assert plan.start.steady.live_bytes <= plan.memory.steady.live_bytes <= limit


def test_levels_of_auto_begin_from_a_step_that_keeps_nothing(seen: dict[str, Any]) -> None:
    plan = seen["auto"]["levels"]
    kept = [point.by_category[Category.KEPT_ATTENTION] for point in plan.memory.curve]
    assert max(kept) > 0
    assert plan.start.steady.live_bytes == seen["json"]["peak_bytes"]


def test_all_block_inputs_fit_and_come_first(seen: dict[str, Any]) -> None:
    auto = seen["auto"]
    assert auto["inputs"].start.host_bytes > 0
    assert auto["inputs"].memory.host_bytes == auto["both"].memory.host_bytes == 0
    assert auto["inputs"].memory.steady.live_bytes == seen["json"]["peak_bytes"]
    # The step before has all inputs on the host, then levels take what is left.
    assert auto["both"].start == auto["inputs"].start
    assert auto["both"].memory.steady == auto["levels"].memory.steady


def test_a_budget_in_numbers_is_not_decided_by_what_is_left(seen: dict[str, Any]) -> None:
    plan = seen["auto"]["levels at most"]
    assert plan.start is plan.memory


def test_only_the_all_to_all_fears_the_router(seen: dict[str, Any]) -> None:
    assert seen["worst"] > 1.2 * seen["balanced"]
    assert seen["relay at worst"] == seen["relay"]


def test_a_deep_models_peak_follows_from_shallow_ones(seen: dict[str, Any]) -> None:
    assert seen["deep, from shallow"] == pytest.approx(seen["deep"], rel=1e-3)


def test_blocks_that_are_unlike_the_others_are_not_multiplied(seen: dict[str, Any]) -> None:
    # Before, the last block stood for the first dense ones and the peak came out twice as high.
    truth, ours = seen["dense first"], seen["dense first, from shallow"]
    assert "experts" in truth.phase
    assert ours.live_bytes == pytest.approx(truth.live_bytes, rel=1e-3)
    assert ours.by_category == pytest.approx(truth.by_category, rel=1e-3)


def test_routed_rows_cost_the_same_at_any_expert_parallel_degree(seen: dict[str, Any]) -> None:
    """Dispatched input 128 MiB and three SwiGLU intermediates of 64 MiB are kept, and no eighth."""
    one, eight = seen["priced"][1], seen["priced"][8]
    assert one == pytest.approx(eight, rel=0.15)
    assert min(one, eight) >= (128 + 192) * MIB


def test_the_report_names_peak_rings_and_verdict(seen: dict[str, Any]) -> None:
    text = "\n".join(seen["lines"])
    for words in ("parameters", "optimizer", "ring buffers", "circulating", "The peak is in"):
        assert words in text
    assert seen["lines"][-1].startswith("FITS")
    assert seen["json"]["fits"] is True
    assert seen["json"]["peak_bytes"] == sum(seen["json"]["at_peak_bytes"].values())
    # Where a microbatch begins and ends, only the trainer can say.
    assert {"forward input", "optimizer step"} <= seen["json"]["working_bytes"].keys()


def test_changes_are_valid_keys_with_their_peaks(seen: dict[str, Any]) -> None:
    changes = seen["changes"]
    assert changes, "nothing proposed"
    assert any(change.fits for change in changes)
    relay = {"relay.dispatcher": "relay", "activation_checkpoint.mode": "none"}
    assert relay in [change.settings for change in changes]
