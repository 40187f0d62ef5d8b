"""What the kernels share: which rows a tile has, products, sums into memory, the activation.

A kernel works on the rows ``first <= i < last`` of rows_N, sorted by expert. ``offsets_ptr`` has
g + 1 bounds: expert ``j`` has the rows ``offsets[j] <= i < offsets[j + 1]``. Its persistent
programs share all (expert, row tile, column tile), and no tile has rows of two experts.

Example: offsets ``[0, 3, 3, 9]``, chunk ``2 <= i < 9``, tiles of 4 rows. Expert 0 has one tile (row
2), expert 1 none, expert 2 two (rows 3 to 6, and 7 and 8): tiles end at ``[1, 1, 3]``.

Offsets that multiply a stride are 64-bit before the multiplication, but for the last dimension's,
which ``launch.operand`` holds to 2^31 elements.
"""

import triton
import triton.language as tl

# Triton decided when it was imported; its own functions show how.
INTERPRETED = tl.constexpr(not isinstance(tl.sum, triton.JITFunction))


@triton.jit
def chunk_bounds(offsets_ptr, first, last, expert):
    """Rows of ``expert`` (one, or a block of them) within the chunk."""
    start = tl.maximum(tl.load(offsets_ptr + expert).to(tl.int32), first)
    end = tl.minimum(tl.load(offsets_ptr + expert + 1).to(tl.int32), last)
    return start, tl.maximum(start, end)


@triton.jit
def row_tile_ends(
    offsets_ptr, first, last, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """For each expert the number of row tiles up to and with it; ``EXPERTS`` is a power of 2."""
    expert_G = tl.arange(0, EXPERTS)
    # Those beyond the last expert repeat it, and have no tiles.
    start_G, end_G = chunk_bounds(offsets_ptr, first, last, tl.minimum(expert_G, num_experts - 1))
    num_tiles_G = tl.where(expert_G < num_experts, tl.cdiv(end_G - start_G, BLOCK_M), 0)
    return tl.cumsum(num_tiles_G, 0)


@triton.jit
def num_tiles_of(ends_G):
    """The last of the running totals ``ends_G``."""
    return tl.max(ends_G, 0)


@triton.jit
def locate(tile, ends_G, num_columns, offsets_ptr, first, last, GROUP_M: tl.constexpr):
    """``(expert, row, end, column)`` of a tile: its first row, its expert's last, its column tile.

    Within an expert tiles go down ``GROUP_M`` rows before they go on to the next column, so that
    programs that run together share both rows and weights in the cache.
    """
    passed_G = ends_G * num_columns <= tile
    expert = tl.sum(passed_G.to(tl.int32), 0)
    begin = tl.max(tl.where(passed_G, ends_G, 0), 0)
    # The expert's own end is the smallest that has not been passed.
    num_row_tiles = tl.min(tl.where(passed_G, 2147483647, ends_G), 0) - begin
    index = tile - begin * num_columns
    group_start = (index // (GROUP_M * num_columns)) * GROUP_M
    group_rows = tl.minimum(num_row_tiles - group_start, GROUP_M)
    within = index % (GROUP_M * num_columns)
    row_tile = group_start + within % group_rows
    start, end = chunk_bounds(offsets_ptr, first, last, expert)
    return expert, start, end, row_tile, within // group_rows


@triton.jit
def load_depth(pointers, is_inside, EVEN_K: tl.constexpr):
    """A tile along the summed dimension: zero past its end, if it has one within a tile."""
    return tl.load(pointers) if EVEN_K else tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def product(left, right, total, INPUT_PRECISION: tl.constexpr):
    """``total + left right`` in float32."""
    if INTERPRETED:
        # The interpreter multiplies bfloat16 as if its bits were integers.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=INPUT_PRECISION)


@triton.jit
def add_to_memory(pointers, value, mask):
    """Sum into memory that other programs sum into as well; rounded at each sum."""
    rounded = value.to(pointers.dtype.element_ty)
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        # The interpreter has no such atomic, and needs none: its programs run one by one.
        tl.store(pointers, (tl.load(pointers, mask=mask).to(tl.float32) + value).to(
            pointers.dtype.element_ty
        ), mask=mask)  # fmt: skip
    else:
        tl.atomic_add(pointers, rounded, mask=mask, sem="relaxed")


@triton.jit
def swiglu(h1, h3, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """The activation's value, of float32; ``LIMIT`` is None when nothing is clamped."""
    if LIMIT is not None:
        # By default minimum and maximum hide a NaN.
        h1 = tl.minimum(h1, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        h3 = tl.maximum(h3, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        h3 = tl.minimum(h3, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return h1 * tl.sigmoid(ALPHA * h1) * (h3 + UP_OFFSET)


@triton.jit
def halves(value_MN):
    """Left and right half of the columns: each thread keeps what it has."""
    num_rows: tl.constexpr = value_MN.shape[0]
    num_columns: tl.constexpr = value_MN.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(value_MN, (num_rows, 2, num_columns)), (0, 2, 1)))
