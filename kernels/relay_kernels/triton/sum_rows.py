"""Sums a chunk's rows into their tokens in a fixed order: the deterministic half of a scatter.

Shape legend: T tokens, K top-k, N = T * K routed rows (row ``t * K + k``), R rows of the chunk, D
columns.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["first", "last", "num_tokens"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"],
)
def sum_rows_kernel(
    out_ptr,
    y_ptr,
    rows_ptr,
    positions_ptr,
    first,
    last,
    num_tokens,
    dim,
    stride_out,
    stride_yr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out[t] += sum over k of y[positions[t K + k] - first]``, in float32, k ascending.

    Rows that are not in the chunk have old or no positions. A position is believed only when it
    lies in the chunk and ``rows`` has that very row there, so nothing need be cleared before.
    """
    t_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token_M = t_M < num_tokens
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    num_rows_M = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for k in range(TOP_K):
        row_M = t_M * TOP_K + k
        position_M = tl.load(positions_ptr + row_M, mask=is_token_M, other=-1)
        is_near_M = is_token_M & (position_M >= first) & (position_M < last)
        found_M = tl.load(rows_ptr + position_M, mask=is_near_M, other=-1).to(tl.int32)
        is_here_M = is_near_M & (found_M == row_M)
        y_MN = y_ptr + (position_M - first).to(tl.int64)[:, None] * stride_yr + d_N[None, :]
        mask_MN = is_here_M[:, None] & (d_N < dim)[None, :]
        sum_MN += tl.load(y_MN, mask=mask_MN, other=0.0).to(tl.float32)
        num_rows_M += is_here_M.to(tl.int32)
    out_MN = out_ptr + t_M.to(tl.int64)[:, None] * stride_out + d_N[None, :]
    mask_MN = (num_rows_M > 0)[:, None] & (d_N < dim)[None, :]
    sum_MN += tl.load(out_MN, mask=mask_MN, other=0.0).to(tl.float32)
    tl.store(out_MN, sum_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)
