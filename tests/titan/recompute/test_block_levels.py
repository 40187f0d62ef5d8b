"""Retention levels on real blocks: equal bits, the bytes that are foretold, the working peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.distributed import run_ranks
from tests.titan.recompute.blocks import QWEN3_RATIOS, relay_model
from tests.titan.runs import a_run, config_file, trainer_of, write_data
from tests.titan.tiny import TINY, apply_model, row_positions, tiny_config
from titan_relay.measure import LiveBytes
from titan_relay.recompute.levels import choose_levels
from titan_relay.titan.model.attention import prepare_cpu_batch
from titan_relay.titan.recompute.cost import Microbatch, Seconds, layer_costs

LEVELS = ("recompute", "output", "full")
NUM_ROWS, SEQ_LEN = 2, 32
TOKENS = torch.randint(64, (NUM_ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
POSITIONS = row_positions(NUM_ROWS, SEQ_LEN, num_pads=3)
TINY_BATCH = Microbatch(NUM_ROWS, SEQ_LEN, cp=1, tp=1, itemsize=4, num_alive=1)


def gradients(model: Any, *, num_backwards: int = 1) -> list[torch.Tensor]:
    loss = apply_model(model, TOKENS, POSITIONS).square().sum()
    for left in reversed(range(num_backwards)):
        loss.backward(retain_graph=left > 0)
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return gradients(relay_model(tiny_config(aux_loss_coeff=0.01), None))


@pytest.mark.parametrize("levels", [*((level,) * 2 for level in LEVELS), ("full", "output")])
def test_gradients_are_equal_to_the_bit_on_every_level(levels, expected) -> None:
    model = relay_model(tiny_config(aux_loss_coeff=0.01), levels)
    assert all(map(torch.equal, gradients(model), expected))
    # Another step: nothing is left over from the first.
    model.zero_grad()
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_that_is_kept_can_be_gone_through_again(level, expected) -> None:
    model = relay_model(tiny_config(aux_loss_coeff=0.01), (level, level))
    for mine, wanted in zip(gradients(model, num_backwards=2), expected, strict=True):
        assert torch.equal(mine, wanted + wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_several_microbatches_may_be_alive(level, expected) -> None:
    """Two forwards, then their backwards in either order, as pipeline schedules do."""
    model = relay_model(tiny_config(aux_loss_coeff=0.01), (level, level))
    losses = [apply_model(model, TOKENS, POSITIONS).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted + wanted)


def test_compiled_halves(expected) -> None:
    model = relay_model(tiny_config(aux_loss_coeff=0.01), ("output", "full"), compiled=True)
    for mine, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)  # sums in another order


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] = self.calls.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_not_computed_again() -> None:
    calls = {}
    for level in LEVELS:
        model = relay_model(TINY, (level, level))
        with _Counter() as counter:
            gradients(model)
        calls[level] = counter.calls
    kernel, ring = "titan_relay.attention.default", "titan_relay.moe.default"
    assert [calls[level][kernel] for level in LEVELS] == [4, 2, 2]
    assert all(calls[level][ring] == 4 for level in LEVELS)  # two of them return zeros at once
    products = [calls[level]["aten.mm.default"] for level in LEVELS]
    assert products[0] == products[1] == products[2] + 2 * 3  # wq, wk and wv of two layers


def block_of(config: Any, level: str, num_tokens: int) -> tuple[Any, Any, torch.Tensor]:
    """A block in bfloat16, the mask and positions of one document, and its input."""
    model: Any = relay_model(config, (level,))
    block = model.layers["0"]
    float32_table = block.attention.rope.cache
    model.bfloat16()
    block.attention.rope.cache = float32_table
    positions = torch.arange(num_tokens)[None]
    _, _, positions, mask = prepare_cpu_batch(positions, positions, positions, None, None)
    x = torch.randn(1, num_tokens, config.dim, generator=torch.Generator().manual_seed(0))
    return (block, mask, positions), model, x.bfloat16().requires_grad_()


@pytest.mark.parametrize("level", LEVELS)
def test_kept_bytes_are_those_foretold(level) -> None:
    """And level recompute keeps one copy of the block's input, and a byte a routed copy."""
    num_tokens = 128
    (block, mask, positions), model, x = block_of(QWEN3_RATIOS, level, num_tokens)
    unit = x.nbytes
    with LiveBytes() as tracker:
        given = x * 1  # the block alone holds it
        out = block(given, mask, positions)
        del given
        held = tracker.live_bytes - out.untyped_storage().nbytes()
        out.backward(torch.ones_like(out))
    choices = num_tokens * QWEN3_RATIOS.moe.top_k
    batch = Microbatch(1, num_tokens, cp=1, tp=1, itemsize=2, num_alive=1)
    cost = layer_costs(model.levels.shapes, batch)[0]
    assert held == unit + choices + cost.bytes_at(level)


def peaks(level: str, num_tokens: int) -> tuple[int, int, int]:
    """Bytes of the block's forward and backward beyond its input, and one unit."""
    (block, mask, positions), _, x = block_of(QWEN3_RATIOS, level, num_tokens)
    unit = x.nbytes
    dout = torch.ones_like(x)
    with LiveBytes() as tracker:
        tracker.include(dout)
        with tracker.phase("forward") as forward:
            out = block(x, mask, positions)
        tracker.exclude(out)  # the next block's input by now
        with tracker.phase("backward") as backward:
            out.backward(dout)
    return forward.peak_bytes, backward.peak_bytes, unit


def test_working_peak_of_a_block_in_units() -> None:
    """A unit is one copy of the tokens. As a slope between two lengths, so without what does not
    grow with them: weight gradients, and buffers of fixed size."""
    short, long = peaks("recompute", 1024), peaks("recompute", 2048)
    unit = long[2] - short[2]
    forward, backward = ((long[i] - short[i]) / unit for i in range(2))
    print(f"forward {forward:.2f} units, backward {backward:.2f} units")
    # On a ring its buffers come on top: "auto" slices aim at two units (see test_memory in
    # tests/moe), and a whole block shall work in 13.
    assert backward <= 11
    assert forward <= 11


@pytest.mark.parametrize("num_on_host", [1, 4])
def test_block_inputs_in_host_memory(num_on_host) -> None:
    """Gone from the device to the byte, within the budget, and gradients of equal bits."""
    config = replace(tiny_config(aux_loss_coeff=0.01), num_layers=4)
    unit = NUM_ROWS * SEQ_LEN * config.dim * 4
    figures = {}
    for budget in (0, num_on_host * unit):
        model: Any = relay_model(config, ("recompute",) * 4, host_budget_bytes=budget)
        with LiveBytes() as tracker:
            loss = apply_model(model, TOKENS, POSITIONS).square().sum()
            held = tracker.live_bytes
            loss.backward()
        figures[budget] = held, tracker.host_peak_bytes, [p.grad for p in model.parameters()]
    (held, _, expected), (held_less, host_bytes, actual) = figures.values()
    assert host_bytes == num_on_host * unit
    assert held - held_less == num_on_host * unit
    assert all(map(torch.equal, actual, expected))


def inputs_come_back(folder: str) -> dict[str, list[Any]]:
    """In a rank: host bytes at the end and each step's loss, by where block inputs wait."""
    found: dict[str, list[Any]] = {}
    for where in ("device", "host", "auto"):
        budget = {} if where == "device" else {"attention_retention__host_budget_gib": 1.0}
        settings = {"training__steps": 4, "attention_retention__block_inputs": where} | budget
        trainer = trainer_of(Path(folder), a_run(where, **settings))
        host = trainer.retention.levels.host
        trainer.train()
        found[where] = [0 if host is None else host.buffers.allocated_bytes, trainer.losses]
        trainer.close()
    return found


def test_block_inputs_come_back_when_there_is_room(tmp_path: Path) -> None:
    write_data(tmp_path)
    config_file(tmp_path)
    found = run_ranks(inputs_come_back, 1, str(tmp_path))[0]
    assert found["host"][0] > 0
    assert found["auto"][0] == found["device"][0] == 0
    assert found["auto"][1] == found["host"][1] == found["device"][1]


def choices(folder: str) -> dict[str, tuple[list[str], int, bool]]:
    """In a rank: for budgets, the levels and bytes after three steps, and whether it measured."""
    budgets = {"auto": "auto", "two outputs": 2 * 8 * 64 * (32 + 4) * 4 / 2**30, "none": 0.0}
    found = {}
    for name, budget in budgets.items():
        settings = {
            "training__steps": 3,
            "training__local_batch_size": 8,
            "attention_retention__mode": "auto",
            "attention_retention__budget_gib": budget,
        }
        trainer = trainer_of(Path(folder), a_run(name, **settings))
        trainer.train()
        chosen = trainer.retention.chosen
        levels = [*chosen.of_layer.values()]
        found[name] = levels, chosen.num_bytes, chosen.seconds > 0
        trainer.close()
    return found


def test_auto_spends_its_budget_after_measuring(tmp_path: Path) -> None:
    write_data(tmp_path)
    config_file(tmp_path)
    found = run_ranks(choices, 1, str(tmp_path))[0]
    levels, _, measured = found["auto"]
    assert levels == ["full", "full"]  # this model is nothing beside the memory of any machine
    assert measured
    _, num_bytes, _ = found["two outputs"]
    assert 0 < num_bytes <= 2 * 8 * 64 * (32 + 4) * 4
    assert found["none"] == (["recompute", "recompute"], 0, False)


def test_measured_times_decide() -> None:
    shapes = relay_model(TINY, ("recompute",) * 2).levels.shapes
    slow_kernel, slow_projections = Seconds(1.0, 0.01), Seconds(0.01, 1.0)
    for measured, expected in (
        (slow_kernel, ["output", "output"]),
        (slow_projections, ["full", "recompute"]),
    ):
        costs = layer_costs(shapes, TINY_BATCH, measured)
        chosen = choose_levels(costs, costs[0].bytes_at("full"))
        assert [*chosen.of_layer.values()] == expected
