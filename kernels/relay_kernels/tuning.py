"""Tuned launch configurations, read from ``configs/ARCH.toml``.

One file per architecture, one table ``[KERNEL.SHAPE_CLASS.WIDTH]`` per choice:

    [up_gate.narrow.16bit]
    BLOCK_M = 128        # upper case: a constexpr of the kernel
    num_warps = 8        # lower case: an option of the compiler or of the launch
    num_stages = 3

A shape class that a kernel's tables leave out falls back to "narrow". ``WIDTH`` is that of the
operands: "16bit" (bfloat16, float16) or "32bit". ``interpreter.toml`` has tiles so small that a
tiny problem has several.
"""

import functools
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from relay_kernels.choice import is_interpreted

INTERPRETER = "interpreter"
ARCHS = ("sm_80", "sm_90", "sm_100")
SHAPE_CLASSES = ("narrow", "wide", "few_rows", "odd")
_OPTIONS = ("num_warps", "num_stages", "programs_per_processor")
_FOLDER = Path(__file__).parent / "configs"

_FEW_ROWS = 48  # per expert; up to here half of a tall tile would stay empty
_WIDE_EXPERT_DIM = 4096
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class TunedConfig:
    """Tile sizes and switches (constexprs of one kernel), and how it is compiled and launched."""

    constexprs: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 1


def shape_class(rows_per_expert: int, dim: int, expert_dim: int, dtype: torch.dtype) -> str:
    """What distinguishes layers for tuning.

    "odd": rows of weights or tokens that no vector load divides; else "few_rows" share an expert's
    weights; else experts are "wide" or "narrow".
    """
    if any(size * dtype.itemsize % _VECTOR_BYTES for size in (dim, expert_dim)):
        return "odd"
    if rows_per_expert <= _FEW_ROWS:
        return "few_rows"
    return "wide" if expert_dim >= _WIDE_EXPERT_DIM else "narrow"


def tuned_config(kernel: str, arch: str, of_class: str, dtype: torch.dtype) -> TunedConfig:
    """The configuration of ``kernel`` for this architecture, shape class and operand dtype.

    Raises:
        KeyError: no table for the kernel and the dtype's width, not even of class "narrow".
    """
    return _configs(arch)[_key(kernel, of_class, dtype, arch)]


def configurations(arch: str) -> dict[tuple[str, str, str], TunedConfig]:
    """Every table of ``configs/ARCH.toml`` by kernel, shape class and width."""
    return dict(_configs(arch))


@contextmanager
def trial(
    kernel: str, arch: str, of_class: str, dtype: torch.dtype, config: TunedConfig
) -> Iterator[None]:
    """Let ``tuned_config`` give ``config`` inside, in this process: for measuring candidates."""
    configs, key = _configs(arch), (kernel, of_class, _width(dtype))
    before = configs.get(key)
    configs[key] = config
    try:
        yield
    finally:
        del configs[key]
        if before is not None:
            configs[key] = before


def _key(kernel: str, of_class: str, dtype: torch.dtype, arch: str) -> tuple[str, str, str]:
    width = _width(dtype)
    for name in (of_class, "narrow"):
        if (kernel, name, width) in _configs(arch):
            return kernel, name, width
    raise KeyError(f"{_FOLDER.name}/{arch}.toml has no table [{kernel}.{of_class}.{width}]")


def _width(dtype: torch.dtype) -> str:
    return f"{dtype.itemsize * 8}bit"


@functools.cache
def _configs(arch: str) -> dict[tuple[str, str, str], TunedConfig]:
    with (_FOLDER / f"{arch}.toml").open("rb") as file:
        tables = tomllib.load(file)
    return {
        (kernel, name, width): _config(values)
        for kernel, classes in tables.items()
        for name, widths in classes.items()
        for width, values in widths.items()
    }


def _config(values: dict[str, int | bool]) -> TunedConfig:
    options = {name: int(values[name]) for name in _OPTIONS if name in values}
    constexprs = {name: value for name, value in values.items() if name not in _OPTIONS}
    return TunedConfig(constexprs, **options)


def arch_of(device: torch.device) -> str:
    """The configuration file's name for a device.

    A chip between two of ours takes the older file's: it has that one's instructions. The newest
    consumer chips (capability 12) have no tensor memory, so they take sm_80's.
    """
    if device.type != "cuda" or is_interpreted():
        return INTERPRETER
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
