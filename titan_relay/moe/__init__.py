"""RelayMoE: Mixture-of-Experts layers whose expert-parallel ranks form a ring.

Needs torch and ``relay_kernels`` only, so that any framework can use it.
"""

from relay_kernels import SwiGLU
from titan_relay.moe.checkpointing import relay_checkpoint
from titan_relay.moe.errors import NonFiniteError, RelayUsageError, RingError, RingMisuseError
from titan_relay.moe.function import ExpertBiases, relay_moe, relay_ops
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.ring import Ring, relay_ring
from titan_relay.moe.telemetry import RingCounts, RingTelemetry

__all__ = [
    "ExpertBiases",
    "NonFiniteError",
    "RelayOptions",
    "RelayUsageError",
    "Ring",
    "RingCounts",
    "RingError",
    "RingMisuseError",
    "RingTelemetry",
    "SwiGLU",
    "relay_checkpoint",
    "relay_moe",
    "relay_ops",
    "relay_ring",
]
