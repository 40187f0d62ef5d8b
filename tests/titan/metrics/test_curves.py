"""Every curve of docs/metrics.md is written, and is what another way of computing it gives.

The truth of losses, loads and norms is one rank's plain forwards over the same rows
(`tests.titan.recorded`), grouped as each layout groups rows; bytes, tokens and learning rates are
counted from the configuration; times and memory lie between what the ranks measured themselves.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.distributed import ROOT, run_ranks
from tests.titan.recorded import (
    COMMON,
    FINITE,
    LAYOUTS,
    NUM_FEW,
    NUM_STEPS,
    RESUMED,
    TOKENS_PER_STEP,
    VALIDATED,
    Beside,
    Layout,
    Truth,
    trained,
    watched,
)
from tests.titan.runs import (
    GLOBAL_BATCH,
    MODEL,
    MOE,
    SEQ_LEN,
    Run,
    a_run,
    config_file,
    layout,
    write_data,
)
from titan_relay.titan.metrics.memory import device_curves
from titan_relay.titan.metrics.speed import SpeedMeter

pytestmark = pytest.mark.timeout(900)

GIB = 1024**3


@dataclass(frozen=True)
class Outcome:
    """Truths by whether the data is finite; by layout its curves and what ranks saw beside it."""

    truths: dict[bool, Truth]
    curves: dict[str, dict[str, dict[int, float]]]
    beside: dict[str, list[Beside]]

    def of(self, name: str) -> tuple[Layout, Truth, dict[str, dict[int, float]], list[Beside]]:
        truth = self.truths[LAYOUTS[name].is_finite]
        return LAYOUTS[name], truth, self.curves[name], self.beside.get(name, [])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("curves")
    write_data(folder)
    config_file(folder)
    (folder / "few.jsonl").write_text(
        "".join((folder / "corpus.jsonl").read_text().splitlines(keepends=True)[:NUM_FEW])
    )
    few = {"data__files": f'["{folder}/few.jsonl"]'}
    runs = {
        name: a_run(name, **COMMON | each.settings | (few if each.is_finite else {}))
        for name, each in LAYOUTS.items()
    }
    of_one = [runs[name] for name in runs if LAYOUTS[name].num_ranks == 1]
    of_four = [run for run in runs.values() if run not in of_one]
    four = run_ranks(trained, 4, str(folder), [*of_four, *RESUMED[:2]], timeout_s=800.0)
    truths = [
        a_run("truth", **COMMON | layout()),
        a_run("finite truth", **COMMON | layout() | FINITE | few),
    ]
    (one,) = run_ranks(on_one_rank, 1, str(folder), truths, [*of_one, RESUMED[2]], timeout_s=400.0)
    beside = {run.name: [rank[run.name] for rank in four] for run in of_four}
    beside |= {run.name: [one[1][run.name]] for run in of_one}
    names = [*runs, "resumed"]
    return Outcome(
        {False: one[0]["truth"], True: one[0]["finite truth"]},
        {name: points(folder / name / "tb") for name in names},
        beside,
    )


def on_one_rank(
    folder: str, truths: list[Run], runs: list[Run]
) -> tuple[dict[str, Truth], dict[str, Beside]]:
    return watched(folder, truths), trained(folder, runs)


def points(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


every_layout = pytest.mark.parametrize("name", list(LAYOUTS))
rings = pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].circulate])


def by_step(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values, start=1))


# What follows is relative: float32 sums in another order, as in tests/titan/train/test_parity.py.


@every_layout
def test_the_mean_loss_is_over_all_tokens(name: str, outcome: Outcome) -> None:
    _, truth, curves, _ = outcome.of(name)
    rows = zip(truth.row_losses, truth.row_tokens, strict=True)
    expected = [sum(losses) / sum(tokens) for losses, tokens in rows]
    assert curves["loss_metrics/global_avg_loss"] == pytest.approx(by_step(expected), rel=1e-5)


@every_layout
def test_the_largest_loss_is_that_of_the_ranks_that_share_rows(name: str, outcome: Outcome) -> None:
    each, truth, curves, _ = outcome.of(name)
    num_rows = GLOBAL_BATCH // each.num_groups
    expected = []
    for losses, tokens in zip(truth.row_losses, truth.row_tokens, strict=True):
        groups = [slice(at, at + num_rows) for at in range(0, GLOBAL_BATCH, num_rows)]
        expected.append(max(sum(losses[g]) / sum(tokens[g]) for g in groups if sum(tokens[g])))
    largest = curves["loss_metrics/global_max_loss"]
    assert largest == pytest.approx(by_step(expected), rel=1e-5)
    assert all(
        largest[step] >= mean for step, mean in curves["loss_metrics/global_avg_loss"].items()
    )


def test_the_finite_runs_had_ranks_without_tokens_and_padding(outcome: Outcome) -> None:
    tokens = outcome.truths[True].row_tokens
    assert any(not sum(step[at : at + 2]) for step in tokens for at in range(0, GLOBAL_BATCH, 2))
    assert any(0 < row < SEQ_LEN for step in tokens for row in step)


@every_layout
def test_the_gradients_norm_is_the_whole_models_before_clipping(
    name: str, outcome: Outcome
) -> None:
    _, truth, curves, _ = outcome.of(name)
    assert curves["grad_norm"] == pytest.approx(by_step(truth.grad_norms), rel=1e-4)


@every_layout
def test_the_learning_rate_follows_the_schedule(name: str, outcome: Outcome) -> None:
    _, truth, curves, _ = outcome.of(name)
    assert len(truth.grad_norms) == NUM_STEPS
    assert curves["lr/AdamW"] == pytest.approx({1: 3e-3 / 2, 2: 3e-3, 3: 3e-3})


def test_the_learning_rate_falls_over_a_resume(outcome: Outcome) -> None:
    rates = outcome.curves["resumed"]["lr/AdamW"]
    # Linearly from the third step, the one after the warm-up, to nothing in the 41st.
    assert rates == pytest.approx(
        {step: 3e-3 * (step / 2 if step < 3 else (41 - step) / 38) for step in range(1, 7)}
    )


@every_layout
def test_tokens_are_counted_over_all_ranks(name: str, outcome: Outcome) -> None:
    _, _, curves, _ = outcome.of(name)
    counts = [step * TOKENS_PER_STEP for step in range(1, NUM_STEPS + 1)]
    assert curves["n_tokens_seen"] == by_step(counts)


def test_tokens_are_counted_on_over_resumes_with_other_ranks(outcome: Outcome) -> None:
    assert outcome.curves["resumed"]["n_tokens_seen"] == {
        step: step * TOKENS_PER_STEP for step in range(1, 7)
    }


@every_layout
def test_validation_takes_its_steps_of_whole_global_batches(name: str, outcome: Outcome) -> None:
    each, truth, curves, beside = outcome.of(name)
    if each.is_finite:
        assert "validation_metrics/loss" not in curves
        return
    assert set(truth.validation_losses) == VALIDATED
    assert curves["validation_metrics/loss"] == pytest.approx(truth.validation_losses, rel=1e-5)
    for step, rate in curves["validation_metrics/tokens_per_second"].items():
        computed, reported = zip(*[rank.validation_seconds[step] for rank in beside], strict=True)
        assert 0.6 * min(computed) <= TOKENS_PER_STEP / rate <= max(reported)


@every_layout
def test_speeds_are_those_that_a_wall_clock_allows(name: str, outcome: Outcome) -> None:
    each, _, curves, beside = outcome.of(name)
    for step, seconds in curves["time/step(s)"].items():
        tokens_per_second = curves["throughput/tokens_per_second"][step]
        assert tokens_per_second * seconds == pytest.approx(TOKENS_PER_STEP)
        per_device = curves["throughput/device_tokens_per_second"][step]
        assert per_device == pytest.approx(tokens_per_second / each.num_ranks)
        teraflops = per_device * beside[-1].num_flops_per_token / 1e12
        assert curves["throughput/device_tflops"][step] == pytest.approx(teraflops)
        within = min(rank.step_seconds[step] for rank in beside)
        assert 0.6 * within <= seconds <= max(rank.report_seconds[step] for rank in beside)
        waiting = curves["time/data_loading(s)"][step]
        assert 0 <= waiting <= seconds
        assert curves["time/data_loading(%)"][step] == pytest.approx(100 * waiting / seconds)


@every_layout
def test_memory_is_between_the_states_and_the_processs(name: str, outcome: Outcome) -> None:
    _, _, curves, beside = outcome.of(name)
    last = max(curves["memory/rss(GiB)"])
    state_gib = max(rank.state_bytes for rank in beside) / GIB
    resident_gib = max(rank.peak_resident_bytes for rank in beside) / GIB
    assert state_gib <= curves["memory/live_peak(GiB)"][last] <= state_gib + 64 / 1024
    assert curves["memory/rss(GiB)"][last] <= curves["memory/rss_peak(GiB)"][last]
    # What is measured beside comes later; other runs of the process follow it, or were larger.
    assert 0.2 * resident_gib <= curves["memory/rss_peak(GiB)"][last] <= resident_gib + 0.01


@every_layout
def test_losses_of_the_routers_are_means_over_layers(name: str, outcome: Outcome) -> None:
    _, truth, curves, _ = outcome.of(name)
    assert curves["moe/aux_loss"] == pytest.approx(by_step(truth.aux_losses), rel=1e-4)
    assert curves["moe/z_loss"] == pytest.approx(by_step(truth.z_losses), rel=1e-4)


@every_layout
def test_loads_are_those_of_all_valid_tokens(name: str, outcome: Outcome) -> None:
    _, truth, curves, _ = outcome.of(name)
    for step, layers in enumerate(truth.tokens_LE, start=1):
        expected = [_load(tokens_E) for tokens_E in layers]
        for layer, load in enumerate(expected):
            for key, value in load.items():
                # A token whose experts are nearly equal may go the other way.
                assert curves[f"moe/load/layer_{layer:02d}/{key}"][step] == pytest.approx(
                    value, abs=0 if key == "dead_experts" else 2e-3
                )
        for key, worst in (("max_share", max), ("entropy", min), ("dead_experts", max)):
            value = worst(load[key] for load in expected)
            assert curves[f"moe/load/worst/{key}"][step] == pytest.approx(value, abs=2e-3)


def _load(tokens_E: list[int]) -> dict[str, float]:
    shares = [tokens / sum(tokens_E) for tokens in tokens_E]
    entropy = -sum(share * math.log(share) for share in shares if share)
    return {
        "max_share": max(shares),
        "entropy": entropy / math.log(len(shares)),
        "dead_experts": tokens_E.count(0),
    }


# What goes to the next rank at a hop, in two halves. Experts: three weights, and in backward their
# gradients with them. Tokens: x, scores, rows and sums; x, its gradient, the output's, and scores,
# theirs and rows.
_PARTS = {"experts": 3 + 6, "tokens": 4 + 6}


@rings
def test_the_ring_sends_what_its_formulas_say(name: str, outcome: Outcome) -> None:
    """In float32: weights there, weights and gradients back; or tokens, their scores and rows."""
    each, _, curves, beside = outcome.of(name)
    hops, dim, top_k = each.ep - 1, int(MODEL["dim"]), int(MOE["top_k"])
    expert = hops * int(MOE["num_experts"]) // each.ep * 3 * dim * int(MOE["expert_dim"]) * 4
    token = hops * each.microbatch_tokens * 4
    expected = {
        "forward/experts_bytes": expert,
        "backward/experts_bytes": 2 * expert,
        "forward/tokens_bytes": token * (2 * dim + 2 * top_k),
        "backward/tokens_bytes": token * (3 * dim + 3 * top_k),
    }
    for key, num_bytes in expected.items():
        assert set(curves[f"relay/expected/{key}"].values()) == {num_bytes}, key
    for direction in ("forward", "backward"):
        values = set(curves[f"relay/expected/{direction}/circulates_tokens"].values())
        assert values == {each.circulate == "tokens"}
    sent = sum(num_bytes for key, num_bytes in expected.items() if str(each.circulate) in key)
    calls = each.local_layers * each.num_microbatches
    num_messages = calls * hops * 2 * _PARTS[str(each.circulate)]
    for step in curves["relay/bytes_sent"]:
        assert curves["relay/bytes_sent"][step] == calls * sent
        assert curves["relay/experts_circulated"][step] == (each.circulate == "experts")
        assert curves["relay/messages"][step] == num_messages
        assert (
            0 <= curves["relay/wait_seconds"][step] <= max(r.report_seconds[step] for r in beside)
        )


@every_layout
def test_what_blocks_keep_is_counted_per_layer(name: str, outcome: Outcome) -> None:
    each, _, curves, _ = outcome.of(name)
    for level in ("recompute", "output", "full"):
        count = each.local_layers if level == each.level else 0
        assert set(curves[f"retention/layers_{level}"].values()) == {count}
    # Of a token, in float32: attention's output and a log-sum-exp per head; queries, keys, values.
    heads, kv_heads, head_dim = (
        int(MODEL[key]) for key in ("num_heads", "num_kv_heads", "head_dim")
    )
    token_bytes = {"recompute": 0, "output": 4 * heads * (head_dim + 1)}
    token_bytes["full"] = token_bytes["output"] + 4 * (heads + 2 * kv_heads) * head_dim
    num_bytes = each.local_layers * each.microbatch_tokens * token_bytes[each.level]
    assert set(curves["retention/bytes"].values()) == {num_bytes}


def test_curves_are_those_of_the_docs(outcome: Outcome) -> None:
    documented = {tag for name in _documented() for tag in _alternatives(name)}
    monitor = SimpleNamespace(get_peak_stats=lambda: _AnyNumber())
    meter = SpeedMeter(num_ranks=1, peak_flops=1.0)
    speed = meter.read(global_tokens=1.0, num_steps=1, data_seconds=0.0, flops_per_token=1)
    written = {
        re.sub(r"layer_\d\d", "layer_NN", tag) for tags in outcome.curves.values() for tag in tags
    }
    written |= set(device_curves(monitor)) | set(speed.curves())
    written = {re.sub(r"^lr/\w+$", "lr/<optimizer>", tag) for tag in written}
    assert written == documented


class _AnyNumber:
    def __getattr__(self, name: str) -> float:
        return 0.0


def _documented() -> list[str]:
    """The names in the first column of every table under "Curves"."""
    text = (ROOT / "docs" / "metrics.md").read_text().split("## Curves")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| ", text, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def _alternatives(name: str) -> list[str]:
    """`a/{b,c}` is `a/b` and `a/c`."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(each) for each in itertools.product(*parts)]
