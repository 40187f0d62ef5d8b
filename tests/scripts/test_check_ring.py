"""The loop-back ring, and ``scripts/check_ring.py``, which runs the whole layer on it.

On a machine with a GPU the same tests run there, with streams.
"""

import pytest
import torch

import check_ring
from layer_bench.setting import Setting
from layer_check.loopback import LoopbackWorld
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe.transport import RingExchange, Where

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = ("--tokens", "96", "--dim", "32", "--expert-dim", "24", "--experts", "12", "--iters", "1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layer_is_right_and_its_bytes_are_those_of_the_formula(capsys, device, dtype):
    arguments = [*SIZES, "--ranks", "1", "2", "3", "--dtype", dtype, "--device", device]
    assert check_ring.main(arguments) == 0, capsys.readouterr().err
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 5  # heading; one rank, and two rings of 2 and of 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--circulate", "experts", "--dtype", "bfloat16"],
        ["--circulate", "tokens", "--deterministic"],
    ],
)
def test_the_fused_kernels_give_the_same_layer(capsys, device, arguments):
    """By the interpreter on CPU: very small, yet more than one step and tile."""
    sizes = ("--tokens", "9", "--dim", "18", "--expert-dim", "15", "--experts", "4")
    arguments = [*sizes, *arguments, "--kernels", "triton", "--device", device, "--ranks", "2"]
    arguments += ["--num-slices", "1", "--iters", "0"]
    assert check_ring.main(arguments) == 0, capsys.readouterr().err


def test_what_is_off_is_said():
    setting = Setting.of(check_ring.parse([*SIZES, "--device", "cpu"]), 2)
    right = check_ring.Bytes(formula=1000, live=1000, allocator=0)
    assert check_ring.judge(setting, {"out": 1e-7}, right) == []
    (line,) = check_ring.judge(setting, {"out": float("nan"), "dx": 1e-7}, right)
    assert line.startswith("out differs from the reference by nan")
    (line,) = check_ring.judge(setting, {"out": 1e-7}, check_ring.Bytes(10**6, 1025000, 0))
    assert line == "1025000 live bytes, 1000000 by the formula"
    (line,) = check_ring.judge(setting, {"out": 1e-7}, check_ring.Bytes(1000, 1000, 1060))
    assert line == "1060 bytes at the allocator's peak, 1000 live"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "--experts 12 must be divisible by --ranks 5"),
        (["--top-k", "13"], "--top-k 13 must be at most --experts 12"),
        (["--device", "cuda"], "there is no CUDA device"),
    ],
)
def test_impossible_settings_are_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        check_ring.main([*SIZES, *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_messages_go_to_the_successor(device):
    def pass_on(rank, ring):
        exchange = RingExchange(ring.link)
        sent = torch.full((4,), float(rank), device=device)
        received = torch.full((4,), -1.0, device=device)
        for hop in range(2):
            exchange.send([sent])
            exchange.receive([received])
            exchange.commit(Where("", "forward", 0, hop))
            exchange.wait()
            sent, received = received, sent
        return int(sent[0]), ring.control.gather([rank, 7])

    results = LoopbackWorld(3, torch.device(device)).run(pass_on)
    numbers = [[0, 7], [1, 7], [2, 7]]
    assert results == [(1, numbers), (2, numbers), (0, numbers)]


def test_the_failure_of_a_rank_ends_all_and_is_the_one_that_is_told():
    def fail_on_two(rank, ring):
        if rank == 2:
            raise ArithmeticError("of rank 2")
        ring.control.gather([rank])

    world = LoopbackWorld(3, torch.device("cpu"))
    with pytest.raises(ArithmeticError, match="of rank 2"):
        world.run(fail_on_two)
    assert world.run(lambda rank, ring: rank) == [0, 1, 2]  # and the world can go on


def test_only_one_rank_runs_at_a_time():
    running = []

    def note(rank, ring):
        for _ in range(3):
            running.append(rank)
            assert len(running) == 1
            running.remove(rank)
            ring.control.gather([rank])

    LoopbackWorld(4, torch.device("cpu")).run(note)


def test_both_worlds_give_the_same_ring_interface():
    def shape_of(rank, ring):
        return ring.link.rank, ring.link.size, ring.control.gather([rank])

    assert VirtualWorld(2).run(shape_of) == LoopbackWorld(2, torch.device("cpu")).run(shape_of)
