"""Backward kernels two and three: gradients of the input and of the weights.

    dx[token] += W1^T dh1 + W3^T dh3
    dW1 (+)= dh1 x^T        dW3 (+)= dh3 x^T        dW2 (+)= g a^T      (sums over an expert's rows)

with ``dh1, dh3, a`` as ``hidden_backward_kernel`` left them, scaled by the score. A tile of a
weight gradient is summed by one program over all of the expert's rows in the chunk, in their order:
no atomics, the same bits every time.

Shape legend: T tokens, K top-k, N = T * K routed rows (row ``t * K + k``), R rows of the chunk, D
model dimension, F expert hidden dimension, g experts, M x N x K a tile's rows, columns and depth.

``DESCRIPTORS`` and ``WARP_SPECIALIZE`` are those of ``forward``.
"""

import triton
import triton.language as tl

from relay_kernels.triton.common import (
    add_to_memory,
    chunk_bounds,
    halves,
    load_depth,
    locate,
    num_tiles_of,
    product,
    row_tile_ends,
)

_CHANGING = ["first", "last", "num_experts"]
_UNALIGNED = ["rows_ptr", "offsets_ptr", "positions_ptr", "scores_ptr"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def dx_kernel(
    dx_ptr,
    positions_ptr,
    dh1_ptr,
    dh3_ptr,
    rows_ptr,
    offsets_ptr,
    w1_ptr,
    w3_ptr,
    first,
    last,
    num_experts,
    dim,
    expert_dim,
    stride_dx_t,
    stride_dx_d,
    stride_r,
    stride_w1_e,
    stride_w1_f,
    stride_w1_d,
    stride_w3_e,
    stride_w3_f,
    stride_w3_d,
    TOP_K: tl.constexpr,
    SCATTERS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """``W1^T dh1[i - first] + W3^T dh3[i - first]``, summed into ``dx[rows[i] // K]``.

    Without ``SCATTERS`` it is stored to ``dx[i - first]``, and ``positions[rows[i]] = i`` says
    where: ``sum_rows_kernel`` adds the rows in a fixed order.
    """
    ends_G = row_tile_ends(offsets_ptr, first, last, num_experts, EXPERTS, BLOCK_M)
    num_columns = tl.cdiv(dim, BLOCK_N)
    # One tile a program: a loop over tiles would keep what they share in registers too.
    tile = tl.program_id(0)
    if tile < num_tiles_of(ends_G) * num_columns:
        expert, start, end, row_tile, column = locate(
            tile, ends_G, num_columns, offsets_ptr, first, last, GROUP_M
        )
        i_M = start + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        r_M = (tl.minimum(i_M, end - 1) - first).to(tl.int64)
        d_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
        f_K = tl.arange(0, BLOCK_K)
        is_inside_N = d_N < dim
        if not DESCRIPTORS:
            offset_MK = r_M[:, None] * stride_r + f_K[None, :]
            w1_KN = w1_ptr + expert.to(tl.int64) * stride_w1_e
            w1_KN += f_K[:, None].to(tl.int64) * stride_w1_f
            w1_KN += d_N[None, :].to(tl.int64) * stride_w1_d
            w3_KN = w3_ptr + expert.to(tl.int64) * stride_w3_e
            w3_KN += f_K[:, None].to(tl.int64) * stride_w3_f
            w3_KN += d_N[None, :].to(tl.int64) * stride_w3_d
        dx_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for f in tl.range(0, expert_dim, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
            if DESCRIPTORS:
                # Rows past the expert's last are another's, or zero; they are not stored.
                row = start + row_tile * BLOCK_M - first
                dh1, dh3 = dh1_ptr.load([row, f]), dh3_ptr.load([row, f])
                w1 = w1_ptr.load([expert, f, column * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
                w3 = w3_ptr.load([expert, f, column * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                is_inside_K = f_K < expert_dim - f
                dh1 = load_depth(dh1_ptr + offset_MK, is_inside_K[None, :], EVEN_K)
                dh3 = load_depth(dh3_ptr + offset_MK, is_inside_K[None, :], EVEN_K)
                is_inside_KN = is_inside_K[:, None] & is_inside_N[None, :]
                w1 = load_depth(w1_KN, is_inside_KN, EVEN_K and EVEN_N)
                w3 = load_depth(w3_KN, is_inside_KN, EVEN_K and EVEN_N)
            dx_MN = product(dh1, w1, dx_MN, INPUT_PRECISION)
            dx_MN = product(dh3, w3, dx_MN, INPUT_PRECISION)
            if not DESCRIPTORS:
                offset_MK += BLOCK_K
                w1_KN += BLOCK_K * tl.cast(stride_w1_f, tl.int64)
                w3_KN += BLOCK_K * tl.cast(stride_w3_f, tl.int64)
        row_M = tl.load(rows_ptr + tl.minimum(i_M, end - 1)).to(tl.int32)
        is_stored_MN = (i_M < end)[:, None] & is_inside_N[None, :]
        column_N = d_N.to(tl.int64)[None, :] * stride_dx_d
        if SCATTERS:
            token_M = (row_M // TOP_K).to(tl.int64)
            add_to_memory(dx_ptr + token_M[:, None] * stride_dx_t + column_N, dx_MN, is_stored_MN)
        else:
            out_MN = dx_ptr + r_M[:, None] * stride_dx_t + column_N
            tl.store(out_MN, dx_MN.to(dx_ptr.dtype.element_ty), mask=is_stored_MN)
            noted_end = tl.where(column == 0, end, start)
            tl.store(positions_ptr + row_M, i_M, mask=i_M < noted_end)


@triton.jit
def experts_of_chunk(offsets_ptr, first, last, num_experts, EXPERTS: tl.constexpr):
    """``(begin, end)`` of the experts whose weight gradients a chunk writes.

    Those with rows in it, and those without any rows whose place is in it, which get zeros. The
    chunk that reaches the last row has also the empty experts behind it.
    """
    expert_G = tl.arange(0, EXPERTS)
    is_expert_G = expert_G < num_experts
    start_G = tl.load(offsets_ptr + expert_G, mask=is_expert_G, other=0)
    end_G = tl.load(offsets_ptr + expert_G + 1, mask=is_expert_G, other=0)
    begin = tl.sum((is_expert_G & (start_G < first) & (end_G <= first)).to(tl.int32), 0)
    end = tl.sum((is_expert_G & (start_G < last)).to(tl.int32), 0)
    reaches_last_row = tl.load(offsets_ptr + num_experts) <= last
    return begin, tl.where(reaches_last_row, num_experts, end)


@triton.jit
def extents(size, offsets_ptr, first, expert, has_rows, ACCUMULATES: tl.constexpr):
    """``(stored, added)``: how much of ``size`` a chunk's sum for an expert is stored to, and how
    much of that on top of what is there; each is all or nothing."""
    with_rows = tl.where(has_rows, size, 0)
    if ACCUMULATES:
        return with_rows, with_rows
    else:
        begins_before = tl.load(offsets_ptr + expert) < first
        return tl.where(begins_before, with_rows, size), tl.where(begins_before, with_rows, 0)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def weight_gradient_kernel(
    dw_ptr,
    dw_b_ptr,
    left_ptr,
    left_b_ptr,
    right_ptr,
    rows_ptr,
    offsets_ptr,
    first,
    last,
    num_experts,
    num_left,
    num_right,
    stride_dw_e,
    stride_dw_m,
    stride_dw_n,
    stride_dw_b_e,
    stride_dw_b_m,
    stride_dw_b_n,
    stride_left_r,
    stride_left_m,
    stride_right_r,
    stride_right_n,
    TOP_K: tl.constexpr,
    GATHERS_LEFT: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """``dw[e] (+)= sum over the rows i of expert e of left[i]^T right[i]``.

    One operand lies in the workspace at ``i - first``, the other is gathered at ``rows[i] // K``;
    ``GATHERS_LEFT`` says which. ``dw_b`` (or None) gets the same of ``left_b``, which shares the
    right operand. Without ``ACCUMULATES`` an expert's first rows overwrite what is there.
    """
    begin, stop = experts_of_chunk(offsets_ptr, first, last, num_experts, EXPERTS)
    num_rows_of_tiles = tl.cdiv(num_left, BLOCK_M)
    num_columns = tl.cdiv(num_right, BLOCK_N)
    num_tiles_each = num_rows_of_tiles * num_columns
    num_tiles = (stop - begin) * num_tiles_each
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = begin + tile // num_tiles_each
        index = tile % num_tiles_each
        group_start = (index // (GROUP_M * num_columns)) * GROUP_M
        group_rows = tl.minimum(num_rows_of_tiles - group_start, GROUP_M)
        within = index % (GROUP_M * num_columns)
        m_M = (group_start + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
        n_start = (within // group_rows) * BLOCK_N
        n_N = n_start + tl.arange(0, BLOCK_N)
        start, end = chunk_bounds(offsets_ptr, first, last, expert)
        k_K = tl.arange(0, BLOCK_K)
        left_M = m_M.to(tl.int64)[:, None] * stride_left_m
        right_N = n_N.to(tl.int64)[None, :] * stride_right_n
        dw_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        dw_b_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # A step's tokens are read one step ahead, so that gathers do not wait for them.
        row_K = tl.load(rows_ptr + start + k_K, mask=k_K < end - start, other=0)
        for i in range(start, end, BLOCK_K):
            is_row_K = k_K < end - i
            token_K = row_K.to(tl.int32) // TOP_K
            next_i = i + BLOCK_K
            row_K = tl.load(rows_ptr + next_i + k_K, mask=k_K < end - next_i, other=0)
            r_K = i - first + k_K
            left_K = (token_K if GATHERS_LEFT else r_K).to(tl.int64)[None, :] * stride_left_r
            right_K = (r_K if GATHERS_LEFT else token_K).to(tl.int64)[:, None] * stride_right_r
            is_left_MK = is_row_K[None, :]
            if not EVEN_M:
                is_left_MK = is_left_MK & (m_M < num_left)[:, None]
            is_right_KN = is_row_K[:, None]
            if not EVEN_N:
                is_right_KN = is_right_KN & (n_N < num_right)[None, :]
            left = tl.load(left_ptr + left_K + left_M, mask=is_left_MK, other=0.0)
            right = tl.load(right_ptr + right_K + right_N, mask=is_right_KN, other=0.0)
            dw_MN = product(left, right, dw_MN, INPUT_PRECISION)
            if dw_b_ptr is not None:
                left_b = tl.load(left_b_ptr + left_K + left_M, mask=is_left_MK, other=0.0)
                dw_b_MN = product(left_b, right, dw_b_MN, INPUT_PRECISION)

        stored, added = extents(num_left, offsets_ptr, first, expert, end > start, ACCUMULATES)
        n_P = n_start + tl.arange(0, BLOCK_N // 2**SPLITS)
        at_M = dw_ptr + expert.to(tl.int64) * stride_dw_e + m_M.to(tl.int64) * stride_dw_m
        _store_sum(at_M, dw_MN, m_M, n_P, stored, added, num_right, stride_dw_n, SPLITS)
        if dw_b_ptr is not None:
            at_M = dw_b_ptr + expert.to(tl.int64) * stride_dw_b_e + m_M.to(tl.int64) * stride_dw_b_m
            _store_sum(at_M, dw_b_MN, m_M, n_P, stored, added, num_right, stride_dw_b_n, SPLITS)


@triton.jit
def _store_sum(at_M, sum_MN, m_M, n_P, stored, added, num_right, stride_n, SPLITS: tl.constexpr):
    """Stores or adds a tile in ``2 ** SPLITS`` pieces of columns, of which ``n_P`` is the first.

    What is there is read piece by piece, so that it need not fit beside the whole sum.
    """
    if SPLITS == 0:
        is_column_P = (n_P < num_right)[None, :]
        at_MP = at_M[:, None] + n_P.to(tl.int64)[None, :] * stride_n
        mask_MP = (m_M < added)[:, None] & is_column_P
        sum_MN += tl.load(at_MP, mask=mask_MP, other=0.0).to(tl.float32)
        mask_MP = (m_M < stored)[:, None] & is_column_P
        tl.store(at_MP, sum_MN.to(at_M.dtype.element_ty), mask=mask_MP)
    else:
        left, right = halves(sum_MN)
        width: tl.constexpr = left.shape[1]
        _store_sum(at_M, left, m_M, n_P, stored, added, num_right, stride_n, SPLITS - 1)
        _store_sum(at_M, right, m_M, n_P + width, stored, added, num_right, stride_n, SPLITS - 1)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def bias_gradient_kernel(
    db_ptr,
    values_ptr,
    scores_ptr,
    rows_ptr,
    offsets_ptr,
    first,
    last,
    num_experts,
    num_values,
    stride_db_e,
    stride_db_n,
    stride_values_r,
    stride_values_n,
    TOP_K: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``db[e] (+)= sum over the rows i of expert e`` of a row of values.

    With scores the values are gathered, ``scores[rows[i]] * values[rows[i] // K]``; with None they
    lie in the workspace, ``values[i - first]``.
    """
    begin, stop = experts_of_chunk(offsets_ptr, first, last, num_experts, EXPERTS)
    num_columns = tl.cdiv(num_values, BLOCK_N)
    for tile in tl.range(tl.program_id(0), (stop - begin) * num_columns, tl.num_programs(0)):
        expert = begin + tile // num_columns
        n_N = (tile % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_inside_N = n_N < num_values
        start, end = chunk_bounds(offsets_ptr, first, last, expert)
        k_K = tl.arange(0, BLOCK_K)
        sum_KN = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
        for i in range(start, end, BLOCK_K):
            is_row_K = k_K < end - i
            mask_KN = is_row_K[:, None] & is_inside_N[None, :]
            if scores_ptr is not None:
                row_K = tl.load(rows_ptr + i + k_K, mask=is_row_K, other=0).to(tl.int32)
                at_K = (row_K // TOP_K).to(tl.int64)
            else:
                at_K = (i - first + k_K).to(tl.int64)
            at_KN = values_ptr + at_K[:, None] * stride_values_r
            at_KN += n_N.to(tl.int64)[None, :] * stride_values_n
            value_KN = tl.load(at_KN, mask=mask_KN, other=0.0).to(tl.float32)
            if scores_ptr is not None:
                score_K = tl.load(scores_ptr + row_K, mask=is_row_K, other=0.0).to(tl.float32)
                value_KN *= score_K[:, None]
            sum_KN += value_KN
        db_N = tl.sum(sum_KN, 0)
        stored, added = extents(num_values, offsets_ptr, first, expert, end > start, ACCUMULATES)
        at_N = db_ptr + expert.to(tl.int64) * stride_db_e + n_N.to(tl.int64) * stride_db_n
        db_N += tl.load(at_N, mask=n_N < added, other=0.0).to(tl.float32)
        tl.store(at_N, db_N.to(db_ptr.dtype.element_ty), mask=n_N < stored)
