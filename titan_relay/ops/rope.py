"""Rotary position embedding that saves positions only, and makes no float32 copy of its input.

Halves of each head are rotated against each other (arXiv:2104.09864 in the layout of GPT-NeoX):
with x = (x1, x2), y = (x1 cos - x2 sin, x2 cos + x1 sin), in float32. The transpose of a rotation
is the rotation back, so the backward is the same op with the sine negated.

Shape legend: B batch, L tokens, N heads, H head dim, P positions of the table.
"""

from typing import Any

import torch

from titan_relay.ops.row_chunks import fake_chunk, row_chunks, wide_dtype

_COPIES = 3  # float32 rows that a chunk's arithmetic has at a time


def rope(x_BLNH: torch.Tensor, table_P2H: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
    """Rotate every head of `x_BLNH` by its token's position; same shape and dtype.

    Args:
        table_P2H: for each position H cosines and H sines, the second half of each repeating the
            first; float32.
        positions_BL: integers in [0, P); (1, L) stands for every row.

    Saved for backward: the table and the positions.
    """
    out: torch.Tensor = _rope(x_BLNH, table_P2H, positions_BL, False)
    return out


@torch.library.custom_op("titan_relay::rope", mutates_args=())
def _rope(
    x_BLNH: torch.Tensor, table_P2H: torch.Tensor, positions_BL: torch.Tensor, back: bool
) -> torch.Tensor:
    num_heads, head_dim = x_BLNH.shape[2:]
    out_BLNH = torch.empty_like(x_BLNH, memory_format=torch.contiguous_format)
    x_TNH, out_TNH = x_BLNH.reshape(-1, num_heads, head_dim), out_BLNH.view(-1, num_heads, head_dim)
    positions_T = positions_BL.expand(x_BLNH.shape[:2]).reshape(-1)
    wide = wide_dtype(x_BLNH.dtype)
    half = head_dim // 2
    for rows in row_chunks(len(x_TNH), _row_bytes(x_BLNH), x_TNH.device):
        angles_T1A = table_P2H[positions_T[rows], None].to(wide)
        cos_T1H, sin_T1H = angles_T1A[..., :half], angles_T1A[..., head_dim : head_dim + half]
        if back:
            sin_T1H = -sin_T1H
        first, second = x_TNH[rows, :, :half].to(wide), x_TNH[rows, :, half:].to(wide)
        out_TNH[rows, :, :half] = first * cos_T1H - second * sin_T1H
        out_TNH[rows, :, half:] = second * cos_T1H + first * sin_T1H
    return out_BLNH


@_rope.register_fake
def _(
    x_BLNH: torch.Tensor, table_P2H: torch.Tensor, positions_BL: torch.Tensor, back: bool
) -> torch.Tensor:
    out_BLNH = torch.empty_like(x_BLNH, memory_format=torch.contiguous_format)
    fake_chunk(x_BLNH.flatten(2), _row_bytes(x_BLNH))
    return out_BLNH


def _row_bytes(x_BLNH: torch.Tensor) -> int:
    return _COPIES * x_BLNH.shape[2] * x_BLNH.shape[3] * wide_dtype(x_BLNH.dtype).itemsize


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, table_P2H, positions_BL, ctx.back = inputs
    ctx.save_for_backward(table_P2H, positions_BL)


def _backward(ctx: Any, dy_BLNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    table_P2H, positions_BL = ctx.saved_tensors
    return _rope(dy_BLNH, table_P2H, positions_BL, not ctx.back), None, None, None


_rope.register_autograd(_backward, setup_context=_setup_context)
