"""A rank that stalls or dies: the others end within the timeout and say where."""

import os
import re
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.moe.parity import run_relay
from tests.moe.virtual_layer import RankOfLayer
from tests.support.distributed import RanksFailed, run_ranks, subgroup
from tests.support.moe_cases import MoeCase
from titan_relay.moe import RelayOptions, RingError, relay_ring

TIMEOUT_S = 2.0
CASE = MoeCase(3, num_tokens=20)


class _Stall(Exception):
    pass


class _BadLink:
    """A link whose rank does something else first when it comes to a hop."""

    def __init__(self, link, hop, action):
        self.rank, self.size = link.rank, link.size
        self.link, self.hops_left, self.action = link, hop, action

    def start(self, sends, receives):
        if self.hops_left == 0:
            self.action()
        self.hops_left -= 1
        return self.link.start(sends, receives)


def _stall():
    time.sleep(3 * TIMEOUT_S)
    raise _Stall


def _run_with_one_bad_rank(circulate, operation, hop, action):
    group = subgroup([0, 1, 2])
    ring = relay_ring(group, timeout=timedelta(seconds=TIMEOUT_S))
    options = RelayOptions(circulate, num_slices=1, layer="layers.5")
    run_relay(CASE, group, options)
    layer = RankOfLayer(CASE, dist.get_rank(), options)
    rings = {"forward": ring, "backward": ring}
    if dist.get_rank() == 2:
        rings[operation] = replace(ring, link=_BadLink(ring.link, hop, action))
    dist.barrier(group)
    begin_s = time.monotonic()
    try:
        layer.forward(rings["forward"])
        layer.backward(rings["backward"])
    except (RingError, _Stall) as error:
        return str(error), time.monotonic() - begin_s
    return "no error", 0.0


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
@pytest.mark.parametrize(("operation", "hop"), [("forward", 1), ("backward", 0)])
def test_a_stalled_rank_is_reported_by_the_others(circulate, operation, hop):
    reports = run_ranks(_run_with_one_bad_rank, 3, circulate, operation, hop, _stall)
    for rank in (0, 1):
        message, seconds = reports[rank]
        assert f"ring rank {rank} of 3" in message
        assert f"layer 'layers.5', {operation}, slice 0, hop" in message
        # One timeout for the stalled neighbour's, one more for a neighbour that gave up first.
        assert seconds < 2 * TIMEOUT_S + 1.5
    # Its successor waits for the stalled rank itself.
    assert f"hop {hop} did not finish (receiving from ring rank 2" in reports[0][0]


def _die():
    os._exit(3)


def _run_and_raise(*args):
    message, seconds = _run_with_one_bad_rank(*args)
    raise RuntimeError(f"{message} after {seconds:.1f} s")


def test_a_dead_rank_is_reported_by_the_others():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_run_and_raise, 3, "experts", "backward", 1, _die)
    reports = str(failure.value)
    assert "the process ended without a report" in reports
    for rank in (0, 1):
        assert re.search(
            rf"ring rank {rank} of 3: the exchange at layer 'layers.5', backward, slice 0, hop \d",
            reports,
        )


def _miss_a_forward():
    group = subgroup([0, 1, 2])
    relay_ring(group, timeout=timedelta(seconds=TIMEOUT_S))
    run_relay(CASE, group, RelayOptions())
    if dist.get_rank() == 1:
        time.sleep(2 * TIMEOUT_S)
        return ""
    with pytest.raises(RingError, match="not every rank reached the forward"):
        run_relay(CASE, group, RelayOptions())
    return ""


def test_a_rank_that_never_comes_is_reported():
    run_ranks(_miss_a_forward, 3)
