"""Forward kernels: gather + up and gate products + SwiGLU; down product + score + sum per token.

Shape legend: T tokens, K top-k, N = T * K routed rows (row ``t * K + k``), R rows of the chunk, D
model dimension, F expert hidden dimension, g experts, M x N x K a tile's rows, columns and depth.

Loads beyond an edge repeat the last row or column, whose results are not stored; along the summed
dimension they give zero. All strides are the tensors' own, so that any view is a valid operand.
With ``DESCRIPTORS`` the weights, and rows that adjoin, are tensor descriptors, whose loads give
zero beyond every edge. With ``WARP_SPECIALIZE`` some warps only load, and others multiply.
"""

import triton
import triton.language as tl

from relay_kernels.triton.common import (
    add_to_memory,
    load_depth,
    locate,
    num_tiles_of,
    product,
    row_tile_ends,
    swiglu,
)

# Values that change from call to call must not lead to a compilation each.
_CHANGING = ["first", "last", "num_experts"]
_UNALIGNED = ["rows_ptr", "offsets_ptr", "scores_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def up_gate_kernel(
    a_ptr,
    x_ptr,
    rows_ptr,
    offsets_ptr,
    w1_ptr,
    w3_ptr,
    b1_ptr,
    b3_ptr,
    first,
    last,
    num_experts,
    dim,
    expert_dim,
    stride_ar,
    stride_x_t,
    stride_x_d,
    stride_w1_e,
    stride_w1_f,
    stride_w1_d,
    stride_w3_e,
    stride_w3_f,
    stride_w3_d,
    stride_b1_e,
    stride_b1_f,
    stride_b3_e,
    stride_b3_f,
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """``a[i - first] = act(W1 x[rows[i] // K] + b1, W3 x[rows[i] // K] + b3)``."""
    ends_G = row_tile_ends(offsets_ptr, first, last, num_experts, EXPERTS, BLOCK_M)
    num_columns = tl.cdiv(expert_dim, BLOCK_N)
    num_tiles = num_tiles_of(ends_G) * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, start, end, row_tile, column = locate(
            tile, ends_G, num_columns, offsets_ptr, first, last, GROUP_M
        )
        i_M = start + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        f_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        d_K = tl.arange(0, BLOCK_K)
        token_M = tl.load(rows_ptr + tl.minimum(i_M, end - 1)).to(tl.int32) // TOP_K
        inside_N = tl.minimum(f_N, expert_dim - 1).to(tl.int64)
        x_MK = x_ptr + token_M.to(tl.int64)[:, None] * stride_x_t + d_K[None, :] * stride_x_d
        if not DESCRIPTORS:
            w1_KN = w1_ptr + expert.to(tl.int64) * stride_w1_e
            w1_KN += inside_N[None, :] * stride_w1_f + d_K[:, None] * stride_w1_d
            w3_KN = w3_ptr + expert.to(tl.int64) * stride_w3_e
            w3_KN += inside_N[None, :] * stride_w3_f + d_K[:, None] * stride_w3_d
        h1_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        h3_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if b1_ptr is not None:
            b1_N = tl.load(b1_ptr + expert.to(tl.int64) * stride_b1_e + inside_N * stride_b1_f)
            b3_N = tl.load(b3_ptr + expert.to(tl.int64) * stride_b3_e + inside_N * stride_b3_f)
            h1_MN += b1_N.to(tl.float32)[None, :]
            h3_MN += b3_N.to(tl.float32)[None, :]
        for d in tl.range(0, dim, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
            x = load_depth(x_MK, (d_K < dim - d)[None, :], EVEN_K)
            if DESCRIPTORS:
                w1 = w1_ptr.load([expert, column * BLOCK_N, d]).reshape(BLOCK_N, BLOCK_K).T
                w3 = w3_ptr.load([expert, column * BLOCK_N, d]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w1 = load_depth(w1_KN, (d_K < dim - d)[:, None], EVEN_K)
                w3 = load_depth(w3_KN, (d_K < dim - d)[:, None], EVEN_K)
            h1_MN = product(x, w1, h1_MN, INPUT_PRECISION)
            h3_MN = product(x, w3, h3_MN, INPUT_PRECISION)
            x_MK += BLOCK_K * tl.cast(stride_x_d, tl.int64)
            if not DESCRIPTORS:
                w1_KN += BLOCK_K * tl.cast(stride_w1_d, tl.int64)
                w3_KN += BLOCK_K * tl.cast(stride_w3_d, tl.int64)
        a_MN = swiglu(h1_MN, h3_MN, ALPHA, LIMIT, UP_OFFSET)
        out_MN = a_ptr + (i_M - first).to(tl.int64)[:, None] * stride_ar + f_N[None, :]
        is_stored_MN = (i_M < end)[:, None] & (f_N < expert_dim)[None, :]
        tl.store(out_MN, a_MN.to(a_ptr.dtype.element_ty), mask=is_stored_MN)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def down_kernel(
    out_ptr,
    positions_ptr,
    a_ptr,
    scores_ptr,
    rows_ptr,
    offsets_ptr,
    w2_ptr,
    b2_ptr,
    first,
    last,
    num_experts,
    dim,
    expert_dim,
    stride_out,
    stride_ar,
    stride_w2_e,
    stride_w2_d,
    stride_w2_f,
    stride_b2_e,
    stride_b2_d,
    TOP_K: tl.constexpr,
    SCATTERS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """``y = scores[rows[i]] * (W2 a[i - first] + b2)``, summed into ``out[rows[i] // K]``.

    Without ``SCATTERS`` it is stored to ``out[i - first]``, and ``positions[rows[i]] = i`` says
    where: ``sum_rows_kernel`` adds the rows in a fixed order.
    """
    ends_G = row_tile_ends(offsets_ptr, first, last, num_experts, EXPERTS, BLOCK_M)
    num_columns = tl.cdiv(dim, BLOCK_N)
    num_tiles = num_tiles_of(ends_G) * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, start, end, row_tile, column = locate(
            tile, ends_G, num_columns, offsets_ptr, first, last, GROUP_M
        )
        i_M = start + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        d_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        f_K = tl.arange(0, BLOCK_K)
        r_M = (tl.minimum(i_M, end - 1) - first).to(tl.int64)
        inside_N = tl.minimum(d_N, dim - 1).to(tl.int64)
        if not DESCRIPTORS:
            a_MK = a_ptr + r_M[:, None] * stride_ar + f_K[None, :]
            w2_KN = w2_ptr + expert.to(tl.int64) * stride_w2_e
            w2_KN += inside_N[None, :] * stride_w2_d + f_K[:, None] * stride_w2_f
        y_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if b2_ptr is not None:
            b2_N = tl.load(b2_ptr + expert.to(tl.int64) * stride_b2_e + inside_N * stride_b2_d)
            y_MN += b2_N.to(tl.float32)[None, :]
        for f in tl.range(0, expert_dim, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
            if DESCRIPTORS:
                # Rows past the expert's last are another's, or zero; they are not stored.
                a = a_ptr.load([start + row_tile * BLOCK_M - first, f])
                w2 = w2_ptr.load([expert, column * BLOCK_N, f]).reshape(BLOCK_N, BLOCK_K).T
            else:
                a = load_depth(a_MK, (f_K < expert_dim - f)[None, :], EVEN_K)
                w2 = load_depth(w2_KN, (f_K < expert_dim - f)[:, None], EVEN_K)
            y_MN = product(a, w2, y_MN, INPUT_PRECISION)
            if not DESCRIPTORS:
                a_MK += BLOCK_K
                w2_KN += BLOCK_K * tl.cast(stride_w2_f, tl.int64)
        row_M = tl.load(rows_ptr + tl.minimum(i_M, end - 1)).to(tl.int32)
        score_M = tl.load(scores_ptr + row_M).to(tl.float32)
        y_MN *= score_M[:, None]
        is_stored_MN = (i_M < end)[:, None] & (d_N < dim)[None, :]
        if SCATTERS:
            token_M = (row_M // TOP_K).to(tl.int64)
            out_MN = out_ptr + token_M[:, None] * stride_out + d_N[None, :]
            add_to_memory(out_MN, y_MN, is_stored_MN)
        else:
            out_MN = out_ptr + r_M[:, None] * stride_out + d_N[None, :]
            tl.store(out_MN, y_MN.to(out_ptr.dtype.element_ty), mask=is_stored_MN)
            # One column's programs note the positions.
            noted_end = tl.where(column == 0, end, start)
            tl.store(positions_ptr + row_M, i_M, mask=i_M < noted_end)
