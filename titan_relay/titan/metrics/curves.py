"""Curves of what this project adds to a step: balancing losses, expert load, the ring."""

from __future__ import annotations

from torch import nn

from titan_relay.moe import RingCounts, RingTelemetry, relay_ring
from titan_relay.titan.metrics.load import load_curves
from titan_relay.titan.model.balance_hook import BalanceStep, moe_layers
from titan_relay.titan.model.experts import RelayRoutedExperts


class StepCurves:
    """What the metrics processor is given to ask; the trainer says where steps begin and end.

    `relay` must be asked before `relay_wait`: it starts a new interval of the rings' counts.
    """

    def __init__(self, balance: BalanceStep, model_parts: list[nn.Module]) -> None:
        self._balance = balance
        self._telemetries = _ring_telemetries(model_parts)
        self._counts = self._reported = RingCounts()
        self._num_steps = self._num_reported_steps = 0

    def begin_step(self) -> None:
        """A step begins; what rings have counted between steps was for a validation."""
        self._take()
        self._num_steps += 1

    def end_step(self) -> None:
        """It is over."""
        self._counts += self._take()

    def _take(self) -> RingCounts:
        counts = (each for t in self._telemetries for each in t.take().values())
        return sum(counts, RingCounts())

    def balance(self) -> dict[str, float]:
        """Balancing losses (means over layers, before their coefficients) and loads; all ranks."""
        stats = self._balance.stats
        if stats is None:
            return {}
        return {
            "moe/aux_loss": float(stats.aux_loss_L.mean()),
            "moe/z_loss": float(stats.z_loss_L.mean()),
            **load_curves(stats.tokens_LE, stats.layer_ids),
        }

    def relay(self) -> dict[str, float]:
        """Bytes and messages that this rank sent on its rings per optimizer step, and in which
        share of its calls experts went round."""
        self._reported, self._counts = self._counts + self._take(), RingCounts()
        self._num_reported_steps, self._num_steps = max(1, self._num_steps), 0
        if not self._telemetries:
            return {}
        return {
            "relay/bytes_sent": self._reported.sent_bytes / self._num_reported_steps,
            "relay/messages": self._reported.num_messages / self._num_reported_steps,
            "relay/experts_circulated": self._reported.num_experts_calls
            / max(1, self._reported.num_calls),
        }

    def relay_wait(self) -> dict[str, float]:
        """Seconds per optimizer step in which this rank waited for its rings."""
        if not self._telemetries:
            return {}
        return {"relay/wait_seconds": self._reported.wait_seconds / self._num_reported_steps}


def _ring_telemetries(model_parts: list[nn.Module]) -> list[RingTelemetry]:
    """One per ring; all layers of a pipeline stage share theirs."""
    groups = {
        moe.routed_experts.group
        for _, moe in moe_layers(model_parts)
        if isinstance(moe.routed_experts, RelayRoutedExperts)
        and moe.routed_experts.group is not None
    }
    return [relay_ring(group).telemetry for group in groups]
