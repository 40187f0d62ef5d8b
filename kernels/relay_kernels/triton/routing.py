"""Routing kernels: a stable counting sort of rows by expert and slice.

Blocks of M rows count their keys; from the counts of all blocks follows where a block's rows of a
key begin; each row then goes there, after those of its block that have its key and come before.

A key is ``expert * S + slice``; an id out of range has the key C = E * S, behind all others.

Shape legend: N = T * K rows, E experts, S slices of the tokens, B blocks of M rows.
"""

import triton
import triton.language as tl


@triton.jit
def row_keys(ids_ptr, row, num_rows, num_experts, rows_per_slice, SLICES: tl.constexpr):
    """The keys of rows; -1 past the last row."""
    expert = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    is_known = (expert >= 0) & (expert < num_experts)
    key = expert.to(tl.int32) * SLICES + (row // rows_per_slice).to(tl.int32)
    key = tl.where(is_known, key, num_experts * SLICES)
    return tl.where(row < num_rows, key, -1)


@triton.jit(do_not_specialize=["num_rows", "rows_per_slice"])
def count_keys_kernel(
    counts_ptr,
    ids_ptr,
    num_rows,
    num_experts,
    rows_per_slice,
    SLICES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``counts[b, key]``: how many of block ``b``'s rows have the key; ``KEYS`` is a power of 2."""
    block = tl.program_id(0).to(tl.int64)
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    key_M = row_keys(ids_ptr, row_M, num_rows, num_experts, rows_per_slice, SLICES)
    counts = tl.histogram(tl.maximum(key_M, 0), KEYS, mask=key_M >= 0)
    tl.store(counts_ptr + block * KEYS + tl.arange(0, KEYS), counts)


@triton.jit(do_not_specialize=["num_rows", "rows_per_slice"])
def place_rows_kernel(
    rows_ptr,
    begins_ptr,
    ids_ptr,
    num_rows,
    num_experts,
    rows_per_slice,
    SLICES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``rows[begins[b, key] + rank] = row``, rank among the block's rows of the key."""
    block = tl.program_id(0).to(tl.int64)
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    key_M = row_keys(ids_ptr, row_M, num_rows, num_experts, rows_per_slice, SLICES)
    rank_M = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for start in range(0, BLOCK_M, BLOCK_N):
        row_N = block * BLOCK_M + start + tl.arange(0, BLOCK_N)
        key_N = row_keys(ids_ptr, row_N, num_rows, num_experts, rows_per_slice, SLICES)
        is_before = (key_N[None, :] == key_M[:, None]) & (row_N[None, :] < row_M[:, None])
        rank_M += tl.sum(is_before.to(tl.int32), 1)
    begin_M = tl.load(begins_ptr + block * KEYS + key_M, mask=key_M >= 0, other=0)
    tl.store(rows_ptr + begin_M + rank_M, row_M.to(tl.int32), mask=key_M >= 0)
