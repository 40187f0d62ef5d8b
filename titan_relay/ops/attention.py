"""Causal attention within documents as one op that saves q, k, v, its output and log-sum-exp.

The same algorithm as a fused kernel's (arXiv:2205.14135, arXiv:2307.08691), in plain torch and for
any device: blocks of queries against all keys they may see, the mask made a block at a time, and in
backward the probabilities rebuilt from the log-sum-exp. With P = exp(scale * q k^T - lse) and
delta = sum over H of dout * out:
dv = P^T dout, ds = P * (dout v^T - delta) * scale, dq = ds k, dk = ds^T q.

Shape legend: B batch, L queries, S keys, N query heads, G key and value heads, R = N / G, H width
of a query or key, U width of a value; b, g, l: a block of B, G, L.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titan_relay.ops.row_chunks import wide_dtype
from titan_relay.private_torch import is_fake

_BLOCK_BYTES = 2**21  # a block of probabilities
_LEAST_QUERIES = 16


@dataclass(frozen=True)
class DocumentMask:
    """Which keys a query may see: those of its own document, not later than itself.

    index_BL, key_index_BS: each query's and each key's place in its row, keys in any order.
    start_BL: the place where the query's document starts. All int32.
    """

    index_BL: torch.Tensor
    start_BL: torch.Tensor
    key_index_BS: torch.Tensor

    def allowed(self) -> torch.Tensor:
        """The whole mask `(B, L, S)`, for looking at."""
        return _allowed(self.index_BL, self.start_BL, self.key_index_BS)


def document_attention(
    q_BLNH: torch.Tensor,
    k_BSGH: torch.Tensor,
    v_BSGU: torch.Tensor,
    mask: DocumentMask,
    scale: float,
) -> torch.Tensor:
    """Attend; returns `(B, L, N, U)`. Every query must see at least one key.

    Saved for backward: q, k, v, the output, and 4 bytes a query and head.
    """
    out_BLNU, _ = _attention(
        q_BLNH, k_BSGH, v_BSGU, mask.index_BL, mask.start_BL, mask.key_index_BS, scale
    )
    result: torch.Tensor = out_BLNU
    return result


class _Call(NamedTuple):
    """What is attended with: the mask as index, start and key index."""

    q_BLNH: torch.Tensor
    k_BSGH: torch.Tensor
    v_BSGU: torch.Tensor
    mask: Sequence[torch.Tensor]
    scale: float


class _Block(NamedTuple):
    """Part of the batch, of the key heads, and of the queries."""

    batch: slice
    heads: slice
    queries: slice


def _blocks(q_BLNH: torch.Tensor, k_BSGH: torch.Tensor) -> Iterator[_Block]:
    """Blocks within the limit: whole sequences where they fit, else queries of one key head."""
    (num_rows, num_queries, num_heads, _), num_keys = q_BLNH.shape, k_BSGH.shape[1]
    num_groups = k_BSGH.shape[2]
    query_bytes = num_heads // num_groups * num_keys * wide_dtype(q_BLNH.dtype).itemsize
    length = max(_LEAST_QUERIES, _BLOCK_BYTES // query_bytes)
    groups = rows = 1
    if length >= num_queries:
        length = num_queries
        groups = min(num_groups, max(1, _BLOCK_BYTES // (length * query_bytes)))
    if groups == num_groups:
        rows = min(num_rows, max(1, _BLOCK_BYTES // (groups * length * query_bytes)))
    for batch in _cut(num_rows, rows):
        for heads in _cut(num_groups, groups):
            for queries in _cut(num_queries, length):
                yield _Block(batch, heads, queries)


def _largest_block(q_BLNH: torch.Tensor, k_BSGH: torch.Tensor) -> list[_Block]:
    """For shape functions: the first block; none where a compiler traces with symbolic sizes."""
    is_static = all(isinstance(size, int) for size in (*q_BLNH.shape, *k_BSGH.shape))
    return [next(_blocks(q_BLNH, k_BSGH))] if is_static else []


def _cut(count: int, length: int) -> Iterator[slice]:
    # One at a time: a plan asks for the first block of a batch of any size.
    return (slice(start, min(start + length, count)) for start in range(0, count, length))


@torch.library.custom_op("titan_relay::attention", mutates_args=())
def _attention(
    q_BLNH: torch.Tensor,
    k_BSGH: torch.Tensor,
    v_BSGU: torch.Tensor,
    index_BL: torch.Tensor,
    start_BL: torch.Tensor,
    key_index_BS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(q_BLNH, k_BSGH, v_BSGU, (index_BL, start_BL, key_index_BS), scale)
    return _forward(call, _blocks(q_BLNH, k_BSGH))


@_attention.register_fake
def _(
    q_BLNH: torch.Tensor, k_BSGH: torch.Tensor, v_BSGU: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *mask, scale = rest
    return _forward(_Call(q_BLNH, k_BSGH, v_BSGU, mask, scale), _largest_block(q_BLNH, k_BSGH))


def _forward(call: _Call, blocks: Iterable[_Block]) -> tuple[torch.Tensor, torch.Tensor]:
    q_BLNH, v_BSGU = call.q_BLNH, call.v_BSGU
    lse_BLN = q_BLNH.new_empty(q_BLNH.shape[:-1], dtype=wide_dtype(q_BLNH.dtype))
    out_BLNU = q_BLNH.new_empty(*q_BLNH.shape[:-1], v_BSGU.shape[-1])
    for block in blocks:
        _forward_block(block, call, out_BLNU, lse_BLN)
    return out_BLNU, lse_BLN


def _forward_block(
    block: _Block, call: _Call, out_BLNU: torch.Tensor, lse_BLN: torch.Tensor
) -> None:
    q_BLNH, k_BSGH, v_BSGU, mask, scale = call
    num_groups = k_BSGH.shape[2]
    allowed, keys = _visible(mask, block)
    q_bgrlH = _queries(q_BLNH, num_groups, block)
    p_bgrlS = _scores(q_bgrlH, _keys(k_BSGH, block, keys), allowed, scale)
    most_bgrl1 = p_bgrlS.amax(dim=-1, keepdim=True)
    sum_bgrl1 = p_bgrlS.sub_(most_bgrl1).exp_().sum(dim=-1, keepdim=True)
    out_bgrlU = _product(p_bgrlS, _keys(v_BSGU, block, keys)).div_(sum_bgrl1)
    _put(out_BLNU, num_groups, block, out_bgrlU)
    _put(lse_BLN.unsqueeze(-1), num_groups, block, sum_bgrl1.log_().add_(most_bgrl1))


@torch.library.custom_op("titan_relay::attention_backward", mutates_args=())
def _attention_backward(
    dout_BLNU: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BSGH: torch.Tensor,
    v_BSGU: torch.Tensor,
    out_BLNU: torch.Tensor,
    lse_BLN: torch.Tensor,
    index_BL: torch.Tensor,
    start_BL: torch.Tensor,
    key_index_BS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Call(q_BLNH, k_BSGH, v_BSGU, (index_BL, start_BL, key_index_BS), scale)
    return _gradients(call, (dout_BLNU, out_BLNU, lse_BLN), _blocks(q_BLNH, k_BSGH))


@_attention_backward.register_fake
def _(
    dout_BLNU: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BSGH: torch.Tensor,
    v_BSGU: torch.Tensor,
    out_BLNU: torch.Tensor,
    lse_BLN: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *mask, scale = rest
    call, blocks = _Call(q_BLNH, k_BSGH, v_BSGU, mask, scale), _largest_block(q_BLNH, k_BSGH)
    return _gradients(call, (dout_BLNU, out_BLNU, lse_BLN), blocks)


def _gradients(
    call: _Call, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor], blocks: Iterable[_Block]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of q, k and v; ``results`` are the output's gradient, the output and the log-sum-exp."""
    q_BLNH, k_BSGH, v_BSGU = call.q_BLNH, call.k_BSGH, call.v_BSGU
    dq_BLNH, dk_BSGH, dv_BSGU = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (q_BLNH, k_BSGH, v_BSGU)
    )
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    for block in blocks:
        if block.queries.start == 0:  # a new part of the keys
            sums = _zero_sums(k_BSGH, v_BSGU, block)
        assert sums is not None
        _backward_block(block, call, results, dq_BLNH, sums)
        if block.queries.stop == q_BLNH.shape[1]:
            dk_BSGH[block.batch, :, block.heads] = sums[0].transpose(1, 2)
            dv_BSGU[block.batch, :, block.heads] = sums[1].transpose(1, 2)
            sums = None
    return dq_BLNH, dk_BSGH, dv_BSGU


def _backward_block(
    block: _Block,
    call: _Call,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dq_BLNH: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write this block's part of dq and add its part of dk and dv."""
    (q_BLNH, k_BSGH, v_BSGU, mask, scale), (dout_BLNU, out_BLNU, lse_BLN) = call, results
    num_groups = k_BSGH.shape[2]
    allowed, keys = _visible(mask, block)
    q_bgrlH = _queries(q_BLNH, num_groups, block)
    k_bgSH = _keys(k_BSGH, block, keys)
    dout_bgrlU = _queries(dout_BLNU, num_groups, block)
    p_bgrlS = _scores(q_bgrlH, k_bgSH, allowed, scale)
    p_bgrlS.sub_(_queries(lse_BLN.unsqueeze(-1), num_groups, block)).exp_()
    sums[1][:, :, keys] += _outer(p_bgrlS, dout_bgrlU)
    delta_bgrl1 = (dout_bgrlU * _queries(out_BLNU, num_groups, block)).sum(-1, keepdim=True)
    ds_bgrlS = _product(dout_bgrlU, _keys(v_BSGU, block, keys).transpose(-1, -2))
    ds_bgrlS.sub_(delta_bgrl1).mul_(p_bgrlS).mul_(scale)
    del p_bgrlS
    sums[0][:, :, keys] += _outer(ds_bgrlS, q_bgrlH)
    _put(dq_BLNH, num_groups, block, _product(ds_bgrlS, k_bgSH))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout_BLNU: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    q_BLNH, k_BSGH, v_BSGU, index_BL, start_BL, key_index_BS, out_BLNU, lse_BLN = ctx.saved_tensors
    gradients = _attention_backward(
        *(dout_BLNU, q_BLNH, k_BSGH, v_BSGU, out_BLNU, lse_BLN),
        *(index_BL, start_BL, key_index_BS, ctx.scale),
    )
    return *gradients, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _allowed(
    index_BL: torch.Tensor, start_BL: torch.Tensor, key_index_BS: torch.Tensor
) -> torch.Tensor:
    key_B1S = key_index_BS[:, None]
    return (key_B1S <= index_BL[:, :, None]).logical_and_(key_B1S >= start_BL[:, :, None])


def _visible(mask: Sequence[torch.Tensor], block: _Block) -> tuple[torch.Tensor, slice]:
    """The block's mask `(b, 1, 1, l, keys)`, and the keys between the first and last seen."""
    index_BL, start_BL, key_index_BS = mask
    allowed_blS = _allowed(
        index_BL[block.batch, block.queries],
        start_BL[block.batch, block.queries],
        key_index_BS[block.batch],
    )
    keys = slice(0, key_index_BS.shape[1])
    if allowed_blS.is_cpu and not is_fake(allowed_blS):  # elsewhere it would wait for the device
        seen = allowed_blS.any(dim=1).any(dim=0).nonzero()
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
    return allowed_blS[:, None, None, :, keys], keys


def _queries(x_BLNH: torch.Tensor, num_groups: int, block: _Block) -> torch.Tensor:
    """The block's rows in the wide dtype, `(b, g, R, l, H)`."""
    rows = x_BLNH[block.batch, block.queries].unflatten(2, (num_groups, -1))
    rows_blgrH = rows[:, :, block.heads]
    return rows_blgrH.permute(0, 2, 3, 1, 4).to(wide_dtype(x_BLNH.dtype)).contiguous()


def _put(x_BLNH: torch.Tensor, num_groups: int, block: _Block, value: torch.Tensor) -> None:
    rows = x_BLNH[block.batch, block.queries].unflatten(2, (num_groups, -1))
    rows[:, :, block.heads] = value.permute(0, 3, 1, 2, 4)


def _keys(x_BSGH: torch.Tensor, block: _Block, keys: slice) -> torch.Tensor:
    """The block's keys or values in the wide dtype, `(b, g, S, H)`."""
    part_bgSH = x_BSGH[block.batch, keys, block.heads].transpose(1, 2)
    return part_bgSH.to(wide_dtype(x_BSGH.dtype)).contiguous()


def _scores(
    q_bgrlH: torch.Tensor, k_bgSH: torch.Tensor, allowed: torch.Tensor, scale: float
) -> torch.Tensor:
    scores_bgrlS = _product(q_bgrlH, k_bgSH.transpose(-1, -2)).mul_(scale)
    return scores_bgrlS.masked_fill_(allowed.logical_not(), float("-inf"))


def _product(x_bgrlH: torch.Tensor, y_bgHS: torch.Tensor) -> torch.Tensor:
    """Every row of a key head's queries times that head's matrix: one GEMM a key head."""
    return torch.matmul(x_bgrlH.flatten(2, 3), y_bgHS).unflatten(2, x_bgrlH.shape[2:4])


def _outer(x_bgrlS: torch.Tensor, y_bgrlH: torch.Tensor) -> torch.Tensor:
    """Summed over the queries of a key head: `(b, g, S, H)`."""
    return torch.matmul(x_bgrlS.flatten(2, 3).transpose(-1, -2), y_bgrlH.flatten(2, 3))


def _zero_sums(
    k_BSGH: torch.Tensor, v_BSGU: torch.Tensor, block: _Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums for dk and dv, `(b, g, S, H)`, in the wide dtype."""
    part_k, part_v = (x[block.batch, :, block.heads].transpose(1, 2) for x in (k_BSGH, v_BSGU))
    wide = wide_dtype(k_BSGH.dtype)
    return (
        torch.zeros(part_k.shape, dtype=wide, device=k_BSGH.device),
        torch.zeros(part_v.shape, dtype=wide, device=v_BSGU.device),
    )
