"""A matrix product, and what can be wrong with it: a registry for ``scripts/check_kernels.py``."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernel_check.variant import KernelVariant


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """``C = A B^T``; HOW is "tensor_cores", "outer" (no ``tl.dot``) or "half" (every other one)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + n[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        if HOW == "outer":
            total += tl.sum(a.to(tl.float32), 1)[:, None] * tl.sum(b.to(tl.float32), 1)[None, :]
        else:
            total = tl.dot(a, tl.trans(b), total)
    if HOW == "half":
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            b = tl.load(b_ptr + n[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            total = tl.dot(
                a.to(tl.float32), tl.trans(b).to(tl.float32), total, input_precision="ieee"
            )
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(tl.bfloat16))


@triton.jit
def wrong(a_ptr, BLOCK: tl.constexpr):
    """Does not compile: no range may have a length that is no power of two."""
    tl.store(a_ptr + tl.arange(0, BLOCK), 0.0)


# BLOCK_M, BLOCK_N, BLOCK_K, HOW, warps, stages
_CONFIGURATIONS = {
    "fit": (64, 64, 64, "tensor_cores", 4, 3),
    "spilling": (128, 256, 64, "tensor_cores", 4, 2),
    "without_tensor_cores": (64, 64, 32, "outer", 4, 2),
    "half_without": (64, 64, 32, "half", 4, 2),
    "too_much_shared_memory": (64, 256, 128, "tensor_cores", 8, 5),
}


def variants(arch: str, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """One variant of each kind; only "fit" is fit on every architecture."""
    pointers, sizes = ("a_ptr", "b_ptr", "c_ptr"), ("M", "N", "K")
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "HOW")
    for name, (*values, num_warps, num_stages) in _CONFIGURATIONS.items():
        constexprs = dict(zip(names, values, strict=True))
        signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(sizes, "i32")
        signature |= dict.fromkeys(names, "constexpr")
        yield KernelVariant(
            name, product, signature, constexprs, (*pointers, *sizes), num_warps, num_stages, True
        )
    signature = {"a_ptr": "*bf16", "BLOCK": "constexpr"}
    yield KernelVariant("wrong", wrong, signature, {"BLOCK": 48}, (), 4, 1, False)
