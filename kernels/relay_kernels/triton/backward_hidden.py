"""Backward kernel one: rebuild the hidden activations and turn them into hidden gradients.

With ``g`` the output's gradient at a row's token and ``s`` its score:

    h1 = W1 x        h3 = W3 x        u = W2^T g        ds = <u, act(h1, h3)>
    dh1 = s u act_1(h1, h3)           dh3 = s u act_3(h1, h3)           a = s act(h1, h3)

A tile needs three sums of M x F in float32, in two phases: first h1 and h3, which share x, then u.
So only one phase's operands take shared memory at a time, and nothing is read twice. With tiles of
128 x 128 on 8 warps the sums fill 192 of a thread's 255 registers. The rest is too little for the
activation of a whole tile, so it is computed in ``2 ** SPLITS`` pieces of columns; and it is too
little for a persistent loop, which keeps in registers what all its tiles have in common (4 to 30
spilled): a program has one tile. The host does not know how many tiles there are, so programs past
the last one end at once.

Shape legend: T tokens, K top-k, N = T * K routed rows (row ``t * K + k``), R rows of the chunk, D
model dimension, F expert hidden dimension, g experts, C column tiles of F; M, F, D also name a
tile's rows, columns and depth, P the columns of a piece.
"""

import triton
import triton.language as tl

from relay_kernels.triton.common import (
    halves,
    load_depth,
    locate,
    num_tiles_of,
    product,
    row_tile_ends,
)

# Values that change from call to call must not lead to a compilation each.
_CHANGING = ["first", "last", "num_experts", "stride_parts"]
_UNALIGNED = ["rows_ptr", "offsets_ptr", "scores_ptr", "dscores_ptr"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def hidden_backward_kernel(
    dh1_ptr,
    dh3_ptr,
    a_ptr,
    parts_ptr,
    x_ptr,
    g_ptr,
    scores_ptr,
    rows_ptr,
    offsets_ptr,
    w1_ptr,
    w3_ptr,
    w2_ptr,
    b1_ptr,
    b3_ptr,
    first,
    last,
    num_experts,
    dim,
    expert_dim,
    stride_r,
    stride_parts,
    stride_x_t,
    stride_x_d,
    stride_g_t,
    stride_g_d,
    stride_w1_e,
    stride_w1_f,
    stride_w1_d,
    stride_w3_e,
    stride_w3_f,
    stride_w3_d,
    stride_w2_e,
    stride_w2_d,
    stride_w2_f,
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
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Writes ``dh1, dh3, a`` at ``i - first`` and ``parts[c, i - first]``, a tile's share of ds.

    The outputs that nobody asks for are None: ``dh1`` and ``dh3``, ``a``, ``parts``. Those three of
    width F have one row stride.
    """
    ends_G = row_tile_ends(offsets_ptr, first, last, num_experts, EXPERTS, BLOCK_M)
    num_columns = tl.cdiv(expert_dim, BLOCK_N)
    tile = tl.program_id(0)
    if tile < num_tiles_of(ends_G) * num_columns:
        expert, start, end, row_tile, column = locate(
            tile, ends_G, num_columns, offsets_ptr, first, last, GROUP_M
        )
        start += row_tile * BLOCK_M
        f_start = column * BLOCK_N
        # Rows beyond the end repeat the last one, and are not stored.
        row_M = tl.load(rows_ptr + tl.minimum(start + tl.arange(0, BLOCK_M), end - 1))
        token_M = (row_M.to(tl.int32) // TOP_K).to(tl.int64)
        f_F = f_start + tl.arange(0, BLOCK_N)
        inside_F = tl.minimum(f_F, expert_dim - 1).to(tl.int64)
        d_D = tl.arange(0, BLOCK_K)
        expert = expert.to(tl.int64)

        x_MD = token_M[:, None] * stride_x_t + d_D[None, :] * stride_x_d
        x_d = x_ptr
        w1_DF = w1_ptr + expert * stride_w1_e
        w1_DF += inside_F[None, :] * stride_w1_f + d_D[:, None] * stride_w1_d
        w3_DF = w3_ptr + expert * stride_w3_e
        w3_DF += inside_F[None, :] * stride_w3_f + d_D[:, None] * stride_w3_d
        h1_MF = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        h3_MF = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for d in range(0, dim, BLOCK_K):
            x = load_depth(x_d + x_MD, (d_D < dim - d)[None, :], EVEN_K)
            w1 = load_depth(w1_DF, (d_D < dim - d)[:, None], EVEN_K)
            w3 = load_depth(w3_DF, (d_D < dim - d)[:, None], EVEN_K)
            h1_MF = product(x, w1, h1_MF, INPUT_PRECISION)
            h3_MF = product(x, w3, h3_MF, INPUT_PRECISION)
            x_d += BLOCK_K * tl.cast(stride_x_d, tl.int64)
            w1_DF += BLOCK_K * tl.cast(stride_w1_d, tl.int64)
            w3_DF += BLOCK_K * tl.cast(stride_w3_d, tl.int64)

        g_MD = token_M[:, None] * stride_g_t + d_D[None, :] * stride_g_d
        g_d = g_ptr
        w2_DF = w2_ptr + expert * stride_w2_e + d_D[:, None].to(tl.int64) * stride_w2_d
        w2_DF += f_F.to(tl.int64)[None, :] * stride_w2_f
        u_MF = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for d in range(0, dim, BLOCK_K):
            g = load_depth(g_d + g_MD, (d_D < dim - d)[None, :], EVEN_K)
            is_inside_DF = (d_D < dim - d)[:, None] & (f_F < expert_dim)[None, :]
            w2 = load_depth(w2_DF, is_inside_DF, EVEN_K and EVEN_N)
            u_MF = product(g, w2, u_MF, INPUT_PRECISION)
            g_d += BLOCK_K * tl.cast(stride_g_d, tl.int64)
            w2_DF += BLOCK_K * tl.cast(stride_w2_d, tl.int64)

        if b1_ptr is not None:
            b1_ptr_e = b1_ptr + expert * stride_b1_e
            b3_ptr_e = b3_ptr + expert * stride_b3_e
        else:
            b1_ptr_e = None
            b3_ptr_e = None
        # A tile's outputs are few enough for 32-bit offsets from its first row.
        offset = (start - first).to(tl.int64) * stride_r
        m_M = tl.arange(0, BLOCK_M)
        is_row_M = m_M < end - start
        # Read again, rather than kept in registers through both loops.
        row_M = tl.load(rows_ptr + tl.minimum(start + m_M, end - 1))
        score_M = tl.load(scores_ptr + row_M).to(tl.float32)
        dscore_M = _pieces(
            _shifted(dh1_ptr, offset), _shifted(dh3_ptr, offset), _shifted(a_ptr, offset),
            b1_ptr_e, b3_ptr_e, h1_MF, h3_MF, u_MF, score_M, m_M, is_row_M,
            f_start + tl.arange(0, BLOCK_N // 2**SPLITS), expert_dim, stride_r, stride_b1_f,
            stride_b3_f, ALPHA, LIMIT, UP_OFFSET, SPLITS,
        )  # fmt: skip
        if parts_ptr is not None:
            parts_M = parts_ptr + column.to(tl.int64) * stride_parts + (start - first) + m_M
            tl.store(parts_M, dscore_M, mask=is_row_M)


@triton.jit
def _shifted(pointer, offset):
    if pointer is None:
        return None
    else:
        return pointer + offset


@triton.jit
def _pieces(
    dh1_ptr, dh3_ptr, a_ptr, b1_ptr, b3_ptr, h1_MF, h3_MF, u_MF, score_M, m_M, is_row_M, f_P,
    expert_dim, stride_r, stride_b1_f, stride_b3_f,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Halves the columns ``SPLITS`` times and stores piece by piece; returns ds per row.

    ``f_P`` are the columns of the first piece.
    """
    if SPLITS == 0:
        return _activation_backward(
            dh1_ptr, dh3_ptr, a_ptr, b1_ptr, b3_ptr, h1_MF, h3_MF, u_MF, score_M, m_M, is_row_M,
            f_P, expert_dim, stride_r, stride_b1_f, stride_b3_f, ALPHA, LIMIT, UP_OFFSET,
        )  # fmt: skip
    else:
        h1_left, h1_right = halves(h1_MF)
        h3_left, h3_right = halves(h3_MF)
        u_left, u_right = halves(u_MF)
        dscore_M = _pieces(
            dh1_ptr, dh3_ptr, a_ptr, b1_ptr, b3_ptr, h1_left, h3_left, u_left, score_M, m_M,
            is_row_M, f_P, expert_dim, stride_r, stride_b1_f, stride_b3_f, ALPHA, LIMIT, UP_OFFSET,
            SPLITS - 1,
        )  # fmt: skip
        return dscore_M + _pieces(
            dh1_ptr, dh3_ptr, a_ptr, b1_ptr, b3_ptr, h1_right, h3_right, u_right, score_M, m_M,
            is_row_M, f_P + h1_left.shape[1], expert_dim, stride_r, stride_b1_f, stride_b3_f, ALPHA,
            LIMIT, UP_OFFSET, SPLITS - 1,
        )  # fmt: skip


@triton.jit
def _activation_backward(
    dh1_ptr, dh3_ptr, a_ptr, b1_ptr, b3_ptr, h1, h3, u, score_M, m_M, is_row_M, f_P,
    expert_dim, stride_r, stride_b1_f, stride_b3_f,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Stores one piece of ``dh1, dh3, a`` and returns its share of ds; all arithmetic in float32.

    The clamps' gradient is zero where they cut off.
    """
    is_column_P = f_P < expert_dim
    if b1_ptr is not None:
        h1 += tl.load(b1_ptr + f_P * stride_b1_f, mask=is_column_P).to(tl.float32)[None, :]
        h3 += tl.load(b3_ptr + f_P * stride_b3_f, mask=is_column_P).to(tl.float32)[None, :]
    if LIMIT is not None:
        # Comparisons, not minimum and maximum, which would hide a NaN.
        is_cut1, is_cut3 = h1 > LIMIT, tl.abs(h3) > LIMIT
        h1 = tl.where(is_cut1, LIMIT, h1)
        h3 = tl.where(is_cut3, tl.where(h3 > 0.0, LIMIT, -LIMIT), h3)
    h3 += UP_OFFSET
    sigmoid = tl.sigmoid(ALPHA * h1)
    gate = h1 * sigmoid
    offset_MP = m_M[:, None] * stride_r + f_P[None, :]
    mask_MP = is_row_M[:, None] & is_column_P[None, :]
    a = gate * h3
    dscore_M = tl.sum(tl.where(is_column_P[None, :], u * a, 0.0), 1)
    if a_ptr is not None:
        scaled = a * score_M[:, None]
        tl.store(a_ptr + offset_MP, scaled.to(a_ptr.dtype.element_ty), mask=mask_MP)
    if dh1_ptr is not None:
        u *= score_M[:, None]
        dh3 = u * gate
        dh1 = u * h3 * sigmoid * (1.0 + ALPHA * h1 * (1.0 - sigmoid))
        if LIMIT is not None:
            dh1, dh3 = tl.where(is_cut1, 0.0, dh1), tl.where(is_cut3, 0.0, dh3)
        tl.store(dh1_ptr + offset_MP, dh1.to(dh1_ptr.dtype.element_ty), mask=mask_MP)
        tl.store(dh3_ptr + offset_MP, dh3.to(dh3_ptr.dtype.element_ty), mask=mask_MP)
    return dscore_M


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def score_gradients_kernel(
    dscores_ptr,
    parts_ptr,
    g_ptr,
    rows_ptr,
    offsets_ptr,
    b2_ptr,
    first,
    last,
    num_experts,
    num_parts,
    dim,
    stride_parts,
    stride_g_t,
    stride_g_d,
    stride_b2_e,
    stride_b2_d,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dscores[rows[i]] = sum over c of parts[c, i - first] + <g, b2>``, always in this order."""
    ends_G = row_tile_ends(offsets_ptr, first, last, num_experts, EXPERTS, BLOCK_M)
    for tile in tl.range(tl.program_id(0), num_tiles_of(ends_G), tl.num_programs(0)):
        expert, start, end, row_tile, _ = locate(tile, ends_G, 1, offsets_ptr, first, last, 1)
        i_M = start + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row_M = i_M < end
        row_M = tl.load(rows_ptr + i_M, mask=is_row_M, other=0).to(tl.int32)
        sum_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for part in range(num_parts):
            part_M = parts_ptr + tl.cast(part, tl.int64) * stride_parts + (i_M - first)
            sum_M += tl.load(part_M, mask=is_row_M, other=0.0)
        if b2_ptr is not None:
            token_M = (row_M // TOP_K).to(tl.int64)
            d_D = tl.arange(0, BLOCK_N).to(tl.int64)
            for d in range(0, dim, BLOCK_N):
                is_inside_D = d_D < dim - d
                g_MD = g_ptr + token_M[:, None] * stride_g_t + (d + d_D)[None, :] * stride_g_d
                b2_D = b2_ptr + expert.to(tl.int64) * stride_b2_e + (d + d_D) * stride_b2_d
                g = tl.load(g_MD, mask=is_inside_D[None, :], other=0.0).to(tl.float32)
                b2 = tl.load(b2_D, mask=is_inside_D, other=0.0).to(tl.float32)
                sum_M += tl.sum(g * b2[None, :], 1)
        tl.store(dscores_ptr + row_M, sum_M.to(dscores_ptr.dtype.element_ty), mask=is_row_M)
