"""What a block keeps between forward and backward, and what its recompute may skip.

Needs torch only.
"""

from titan_relay.recompute.relay_checkpoint import relay_checkpoint

__all__ = ["relay_checkpoint"]
