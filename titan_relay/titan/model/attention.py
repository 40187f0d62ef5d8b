"""Attention on CPU: an op of ours, causal within documents.

FlexAttention has no backward on CPU. `CpuAttention` stays a FlexAttention, so torchtitan's context
parallelism recognises it and gathers keys and values for it; only the kernel differs.

Shape suffixes: B batch, L tokens of this rank (queries), S tokens of the whole row (keys), N heads,
H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.common.attention import FlexAttention

from titan_relay.ops import DocumentMask, document_attention


class CpuAttention(FlexAttention):
    """Causal attention within documents; float32 in, float32 arithmetic."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DocumentMask,
        scale: float | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend; returns `(B, L, N, H)`.

        The arguments' names are part of torchtitan's sharding tables. Under context parallelism
        keys and values cover the whole row, `(B, S, N, H)`.
        """
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        return document_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)


def document_starts(positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every token the place where its document starts in its row, and its own place; int32.

    A position of 0 starts a document; so does every pad (-1).
    """
    index_BS = torch.arange(positions_BS.shape[1], dtype=torch.int32, device=positions_BS.device)
    index_BS = index_BS.expand_as(positions_BS).contiguous()
    starts_BS = torch.where(positions_BS <= 0, index_BS, 0)
    return starts_BS.cummax(dim=1).values.int(), index_BS


def prepare_cpu_batch(
    inputs_BS: torch.Tensor,
    labels_BS: torch.Tensor,
    positions_BS: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    load_balancer: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DocumentMask]:
    """Take this rank's part of each row and build its mask.

    Args:
        inputs_BS, labels_BS, positions_BS: whole rows; positions count from 0 in each document
            and are -1 at padding.
        cp_mesh: the context-parallel mesh, or None.
        load_balancer: how context parallelism cuts rows ("headtail", or None for plain blocks).

    Returns:
        inputs, labels and positions of this rank `(B, L)`, and the mask whose keys stand in the
        order in which context parallelism gathers them: rank after rank.
    """
    start_BS, index_BS = document_starts(positions_BS)
    if cp_mesh is None:
        mask = DocumentMask(index_BS, start_BS, index_BS)
        return inputs_BS, labels_BS, positions_BS, mask

    (inputs, labels, positions, start_BL, index_BL), _ = cp_shard(
        cp_mesh, (inputs_BS, labels_BS, positions_BS, start_BS, index_BS), None, load_balancer
    )
    index_BL = index_BL.contiguous()
    gathered = [torch.empty_like(index_BL) for _ in range(cp_mesh.size())]
    dist.all_gather(gathered, index_BL, group=cp_mesh.get_group())
    mask = DocumentMask(index_BL, start_BL.contiguous(), torch.cat(gathered, dim=1))
    return inputs, labels, positions, mask
