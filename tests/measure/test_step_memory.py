"""Reading a recorded step: peaks, owners, working memory, and the picture."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from titan_relay.measure.devices import device_named
from titan_relay.measure.ledger import Event, Label
from titan_relay.measure.step_memory import Category, Mark, StepMemory, step_memory
from titan_relay.titan.plan.alltoall import worst_rows
from titan_relay.titan.plan.picture import draw_step

_MIB = 2**20


def recorded_step() -> StepMemory:
    """One block of one layer, by hand: every storage's birth and death with its phase."""
    marks, events = [], []
    live = 0

    def change(serial: int, delta: int, phase: str, op: str = "op") -> None:
        nonlocal live
        live += delta
        events.append(Event(serial, delta, live, Label(phase, op)))

    def enter(phase: str) -> None:
        marks.append(Mark(len(events), phase))

    change(0, 100, "parameters")
    enter("forward attention 0")
    change(1, 10, "forward attention 0")  # the block's input
    change(2, 50, "fsdp forward attention 0")  # unsharded weights
    change(3, 30, "forward attention 0")  # kept for backward
    change(4, 40, "forward attention 0")  # temporary
    change(4, -40, "forward attention 0")
    change(2, -50, "fsdp forward attention 0")
    enter("backward attention 0")
    change(5, 60, "backward attention 0")  # temporary
    change(6, 100, "fsdp backward attention 0")  # becomes the gradient
    change(3, -30, "forward attention 0")
    change(5, -60, "backward attention 0")
    change(1, -10, "forward attention 0")
    enter("optimizer step")
    change(7, 200, "optimizer step")  # state
    change(8, 5, "optimizer step")
    change(8, -5, "optimizer step")
    owners = {
        Category.PARAMETERS: {0},
        Category.OPTIMIZER: {7},
        Category.GRADIENTS: {6},
        Category.BLOCK_INPUTS: {1},
    }
    return step_memory(events, marks, owners, num_points=1000)


def test_the_first_step_has_no_optimizer_state_until_its_update() -> None:
    memory = recorded_step()
    assert (memory.first.live_bytes, memory.first.phase) == (405, "optimizer step")
    assert (memory.steady.live_bytes, memory.steady.phase) == (500, "backward attention 0")


def test_what_is_live_at_the_peak_adds_up_by_owner() -> None:
    by_category = recorded_step().steady.by_category
    assert {name: size for name, size in by_category.items() if size} == {
        Category.PARAMETERS: 100,
        Category.OPTIMIZER: 200,
        Category.BLOCK_INPUTS: 10,
        Category.KEPT_ATTENTION: 30,
        Category.ATTENTION: 60,
        Category.GRADIENTS: 100,
    }
    assert by_category[Category.FSDP] == 0


def test_rises_and_curve() -> None:
    memory = recorded_step()
    assert memory.rises["forward attention"] == 130
    assert memory.rises["backward attention"] == memory.rises["backward block"] == 160
    assert {phase: point.live_bytes for phase, point in memory.highs.items()} == {
        "forward attention 0": 430,
        "backward attention 0": 500,
        "optimizer step": 405,
    }
    assert max(point.live_bytes for point in memory.curve) == 500


def test_the_picture_shows_the_limit_and_who_owns_what(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    draw_step(recorded_step().curve, "a < b", file, limit_bytes=600)
    ElementTree.parse(file)
    # matplotlib draws text as paths, and says in a comment what it is.
    for text in ("a &lt; b", "usable", Category.PARAMETERS, "forward", "backward"):
        assert f"<!-- {text} -->" in file.read_text()


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "num_local", "worst"),
    [
        (4096 * 8, 1, 128, 4096 * 8),
        (4096 * 8, 8, 16, 8 * 4096 * 8),
        # 2 experts a rank: a token of top-8 can bring a rank no more than 2 rows.
        (10 * 8, 4, 2, 4 * 10 * 2),
    ],
)
def test_the_worst_routing_sends_every_token_here(
    num_rows: int, num_ranks: int, num_local: int, worst: int
) -> None:
    assert worst_rows(num_rows, num_ranks, top_k=8, num_local=num_local) == worst


def test_devices_by_name_and_by_size() -> None:
    assert device_named("h100-80g").capacity_bytes == 81559 * _MIB
    assert device_named("H100-80G") == device_named("h100-80g")
    assert device_named("48.5").capacity_bytes == int(48.5 * 2**30)
    assert device_named("cpu").is_cpu
    assert not device_named("48.5").is_cpu
    for wrong in ("h100", "-1", "inf", "nan", ""):
        with pytest.raises(ValueError, match="h100-80g"):
            device_named(wrong)
