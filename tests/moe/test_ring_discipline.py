"""Buffers and order: a hostile link finds no misuse, and the exchange refuses every misuse."""

import pytest
import torch

from tests.moe.parity import FLOAT32_TOLERANCE
from tests.moe.virtual_layer import run_virtual, virtual_errors
from tests.support.moe_cases import MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions, RingMisuseError
from titan_relay.moe.transport import RingExchange, Where

HERE = Where("layer", "forward", 0, 0)


@pytest.mark.parametrize("changes", [{}, {"skew": "one_expert"}, {"has_biases": True}])
@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_late_delivery_and_spoilt_buffers_change_nothing(circulate, num_ranks, num_slices, changes):
    case = MoeCase(num_ranks, num_experts=12, num_tokens=17, **changes)
    options = RelayOptions(circulate, num_slices=num_slices, max_rows_per_step=5)
    errors = virtual_errors(case, options, VirtualWorld(num_ranks, hostile=True))
    assert max(errors.values()) < FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_late_delivery_with_gradients_summed_in_a_wider_dtype(circulate):
    case = MoeCase(3, num_experts=6, num_tokens=17)
    options = RelayOptions(circulate, num_slices=2, grad_dtype="float64")
    errors = virtual_errors(case, options, VirtualWorld(3, hostile=True))
    assert max(errors.values()) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_unequal_tokens_under_late_delivery(circulate):
    case = MoeCase(3, num_experts=6, tokens_by_rank=(5, 0, 3))
    options = RelayOptions(circulate, num_slices=2, max_tokens_per_rank=6)
    errors = virtual_errors(case, options, VirtualWorld(3, hostile=True))
    assert max(errors.values()) < FLOAT32_TOLERANCE


class StampedCase(MoeCase):
    """Every weight is its owner's number, so that a stale or swapped buffer shows its owner."""

    def weights(self):
        stamp = torch.arange(self.num_experts) // (self.num_experts // self.num_ranks)
        return [
            torch.ones_like(weight) * stamp.view(-1, 1, 1).float() for weight in super().weights()
        ]


class RecordingWorld(VirtualWorld):
    """Notes the values that each rank sends, one set an exchange."""

    def __init__(self, size):
        super().__init__(size, hostile=True)
        self.sent_values = [[] for _ in range(size)]

    def post(self, rank, sends, receives):
        self.sent_values[rank].append(
            {value for tensor in sends for value in tensor.unique().tolist()}
        )
        return super().post(rank, sends, receives)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_each_hop_passes_on_the_weights_of_the_expected_owner(num_ranks):
    world = RecordingWorld(num_ranks)
    options = RelayOptions("experts", num_slices=2)
    run_virtual(StampedCase(num_ranks, num_experts=12), options, world)
    for rank, sent in enumerate(world.sent_values):
        once = [{(rank - hop) % num_ranks} for hop in range(num_ranks - 1)]
        assert sent[: 2 * len(once)] == 2 * once  # the forward's slices


def test_hostile_link_notices_a_buffer_changed_in_flight():
    def edit_after_commit(rank, ring):
        exchange = RingExchange(ring.link)
        sent, received = torch.ones(3), torch.empty(3)
        exchange.send([sent])
        exchange.receive([received])
        exchange.commit(HERE)
        if rank == 0:
            sent.zero_()
        ring.control.gather([0])
        exchange.wait()

    with pytest.raises(AssertionError, match="changed while it was being sent"):
        VirtualWorld(2, hostile=True).run(edit_after_commit)


def _misuses():
    def queue_in_flight(exchange, sent, received):
        exchange.send([sent])
        exchange.receive([received])
        exchange.commit(HERE)
        exchange.send([sent])

    def commit_twice(exchange, sent, received):
        exchange.send([sent])
        exchange.receive([received])
        exchange.commit(HERE)
        exchange.commit(HERE)

    def wait_without_commit(exchange, sent, received):
        exchange.send([sent])
        exchange.wait()

    def close_open(exchange, sent, received):
        exchange.send([sent])
        exchange.close()

    def same_buffer(exchange, sent, received):
        exchange.send([sent])
        exchange.receive([sent])
        exchange.commit(HERE)

    def overlapping(exchange, sent, received):
        exchange.receive([received[:4], received[3:]])
        exchange.commit(HERE)

    def strided(exchange, sent, received):
        exchange.send([sent.view(2, 3).t()])

    return [
        queue_in_flight,
        commit_twice,
        wait_without_commit,
        close_open,
        same_buffer,
        overlapping,
        strided,
    ]


class _LinkThatNeverEnds:
    rank, size = 0, 2

    def start(self, sends, receives):
        return self

    def wait(self):
        raise AssertionError("not reached")


@pytest.mark.parametrize("misuse", _misuses())
def test_misuse_raises(misuse):
    exchange = RingExchange(_LinkThatNeverEnds())
    with pytest.raises(RingMisuseError):
        misuse(exchange, torch.zeros(6), torch.zeros(6))


def test_empty_exchange_is_nothing():
    exchange = RingExchange(_LinkThatNeverEnds())
    exchange.commit(HERE)
    exchange.wait()
    exchange.close()
    assert exchange.counts.num_messages == 0
