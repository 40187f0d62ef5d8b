"""Attention of a run on CUDA, for its dry run on fake CPU tensors.

A flash kernel saves q, k, v, its output and the log-sum-exp, as our op for CPU does; its mask is a
list of blocks, and so is left without a place in the batch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel import cp_shard

from titan_relay.ops import DocumentMask
from titan_relay.titan.train import trainer


@contextmanager
def flash_attention() -> Iterator[None]:
    """Attend as on CUDA inside."""
    prepare = trainer.prepare_cpu_batch
    trainer.prepare_cpu_batch = _with_mask_of_blocks
    try:
        yield
    finally:
        trainer.prepare_cpu_batch = prepare


def _with_mask_of_blocks(
    inputs_BS: torch.Tensor,
    labels_BS: torch.Tensor,
    positions_BS: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    load_balancer: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DocumentMask]:
    batch = (inputs_BS, labels_BS, positions_BS)
    if cp_mesh is not None:
        batch, _ = cp_shard(cp_mesh, batch, None, load_balancer)
    # Expanded from one number each: they are read, and take no memory.
    number = inputs_BS.new_empty((1, 1), dtype=torch.int32)
    queries_BL, keys_BS = number.expand(batch[0].shape), number.expand(inputs_BS.shape)
    return *batch, DocumentMask(queries_BL, queries_BL, keys_BS)
