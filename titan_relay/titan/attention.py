"""Attention on CPU: scaled-dot-product attention under a document mask.

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
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.common.attention import FlexAttention


@dataclass(frozen=True)
class DocumentMask:
    """Which key each query may see: the same document, and not later than itself."""

    allowed_B1LS: torch.Tensor


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
        enable_gqa: bool = False,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend; returns `(B, L, N, H)`.

        The arguments' names are part of torchtitan's sharding tables. Under context parallelism
        keys and values cover the whole row, `(B, S, N, H)`.
        """
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks.allowed_B1LS,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


def document_ids(positions_BS: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row. A position of 0 starts one; so does every pad (-1)."""
    return (positions_BS <= 0).long().cumsum(dim=1)


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
    docs_BS = document_ids(positions_BS)
    if cp_mesh is None:
        causal_SS = torch.ones(docs_BS.shape[1], docs_BS.shape[1], dtype=torch.bool).tril()
        allowed_BSS = (docs_BS[:, :, None] == docs_BS[:, None, :]) & causal_SS
        return inputs_BS, labels_BS, positions_BS, DocumentMask(allowed_BSS[:, None])

    index_BS = torch.arange(docs_BS.shape[1]).expand_as(docs_BS).contiguous()
    (inputs, labels, positions, index_BL), _ = cp_shard(
        cp_mesh, (inputs_BS, labels_BS, positions_BS, index_BS), None, load_balancer
    )
    index_BL = index_BL.contiguous()
    gathered = [torch.empty_like(index_BL) for _ in range(cp_mesh.size())]
    dist.all_gather(gathered, index_BL, group=cp_mesh.get_group())
    key_index_BS = torch.cat(gathered, dim=1)
    docs_of_queries_BL = docs_BS.gather(1, index_BL)
    docs_of_keys_BS = docs_BS.gather(1, key_index_BS)
    allowed_BLS = (docs_of_queries_BL[:, :, None] == docs_of_keys_BS[:, None, :]) & (
        index_BL[:, :, None] >= key_index_BS[:, None, :]
    )
    return inputs, labels, positions, DocumentMask(allowed_BLS[:, None])
