"""What each architecture offers a kernel, from NVIDIA's CUDA programming and tuning guides."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Limits of one architecture, and the tensor-core instructions that use it fully."""

    arch: str
    shared_bytes: int  # the most that one block may have, opted in
    tensor_memory_columns: int
    tensor_core: re.Pattern[str]
    tensor_core_name: str


_KIB = 1024

CHIPS = {
    chip.arch: chip
    for chip in (
        Chip("sm_80", 163 * _KIB, 0, re.compile(r"HMMA\b"), "HMMA"),
        Chip("sm_90", 227 * _KIB, 0, re.compile(r"HGMMA\b"), "HGMMA"),
        Chip("sm_100", 227 * _KIB, 512, re.compile(r"UTC[A-Z]*MMA\b"), "UTC*MMA"),
    )
}
