"""Attention of a run on CUDA, for its dry run on fake CPU tensors.

A flash kernel saves q, k, v, its output and the log-sum-exp; its mask is a list of blocks, not a
tensor of queries times keys. PyTorch's fused attention without a mask has that same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel import cp_shard

from titan_relay.titan import trainer
from titan_relay.titan.attention import CpuAttention, DocumentMask


@contextmanager
def flash_attention() -> Iterator[None]:
    """Attend as on CUDA inside."""
    forward, prepare = CpuAttention.forward, trainer.prepare_cpu_batch
    CpuAttention.forward = _attend  # type: ignore[method-assign]
    trainer.prepare_cpu_batch = _without_mask
    try:
        yield
    finally:
        CpuAttention.forward = forward  # type: ignore[method-assign]
        trainer.prepare_cpu_batch = prepare


def _attend(
    self: CpuAttention,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    enable_gqa: bool = False,
    **unused: Any,
) -> torch.Tensor:
    """In the place of `CpuAttention.forward`; torchtitan looks at the arguments' names."""
    out_BNLH = F.scaled_dot_product_attention(
        q_BLNH.transpose(1, 2),
        k_BLNH.transpose(1, 2),
        v_BLNH.transpose(1, 2),
        enable_gqa=enable_gqa,
    )
    return out_BNLH.transpose(1, 2)


def _without_mask(
    inputs_BS: torch.Tensor,
    labels_BS: torch.Tensor,
    positions_BS: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    load_balancer: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DocumentMask]:
    batch = (inputs_BS, labels_BS, positions_BS)
    if cp_mesh is not None:
        batch, _ = cp_shard(cp_mesh, batch, None, load_balancer)
    return *batch, DocumentMask(inputs_BS.new_empty(1, 1, 1, 1, dtype=torch.bool))
