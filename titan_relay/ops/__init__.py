"""Registered ops of a transformer block that keep little for backward and copy little within.

Each is one op to autograd, checkpointing and compilers, with a shape function that allocates what
the real one allocates, so that a dry run on fake tensors sees the same peak. They work on plain
torch, on any device, and know nothing of the rest of the project.
"""

from titan_relay.ops.attention import DocumentMask, document_attention
from titan_relay.ops.feed_forward import feed_forward
from titan_relay.ops.float32_linear import float32_linear
from titan_relay.ops.rms_norm import rms_norm
from titan_relay.ops.rope import rope

__all__ = [
    "DocumentMask",
    "document_attention",
    "feed_forward",
    "float32_linear",
    "rms_norm",
    "rope",
]
