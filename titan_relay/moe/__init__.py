"""RelayMoE: Mixture-of-Experts layers whose expert-parallel ranks form a ring.

Needs torch and ``relay_kernels`` only, so that any framework can use it.
"""

from relay_kernels import ExpertWeights, KernelChoiceError, SwiGLU, uses_triton
from titan_relay.moe.errors import NonFiniteError, RelayUsageError, RingError, RingMisuseError
from titan_relay.moe.fake import fake_device
from titan_relay.moe.function import relay_moe, relay_ops
from titan_relay.moe.memory import (
    WorkingMemory,
    backward_memory,
    forward_memory,
    routing_peak_bytes,
)
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.ring import Ring, relay_ring, set_ring_timeout
from titan_relay.moe.shapes import LayerShape
from titan_relay.moe.telemetry import RingCounts, RingTelemetry
from titan_relay.moe.traffic import Traffic, backward_traffic, circulations, forward_traffic
from titan_relay.moe.warm_up import warm_up

__all__ = [
    "ExpertWeights",
    "KernelChoiceError",
    "LayerShape",
    "NonFiniteError",
    "RelayOptions",
    "RelayUsageError",
    "Ring",
    "RingCounts",
    "RingError",
    "RingMisuseError",
    "RingTelemetry",
    "SwiGLU",
    "Traffic",
    "WorkingMemory",
    "backward_memory",
    "backward_traffic",
    "circulations",
    "fake_device",
    "forward_memory",
    "forward_traffic",
    "relay_moe",
    "relay_ops",
    "relay_ring",
    "routing_peak_bytes",
    "set_ring_timeout",
    "uses_triton",
    "warm_up",
]
