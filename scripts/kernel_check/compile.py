"""Compile kernel variants for chips that are not there, and measure the machine code.

Triton keeps what it has compiled in its own cache; measurements are kept beside it, so that a
second check takes a moment.
"""

import dataclasses
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_check.chips import CHIPS
from kernel_check.sass import MachineCode, parse_resources
from kernel_check.variant import KernelVariant


@dataclass(frozen=True)
class Measured:
    """What the compiler made of one variant for one architecture."""

    registers: int = 0
    stack_bytes: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_memory_columns: int = 0
    tensor_core_names: tuple[str, ...] = ()
    num_tensor_core: int = 0  # of the chip's own kind, inside loops
    num_scalar_products: int = 0  # in the worst innermost loop without tensor cores
    load_widths: Mapping[str, int] = field(default_factory=dict)
    specializes_warps: bool = False
    error: str = ""


def measure(variant: KernelVariant, arch: str) -> Measured:
    """Compile, disassemble, count. A kernel that does not compile is a result with ``error``."""
    try:
        compiled = variant.compile(arch)
    except Exception as error:  # a compiler fails in as many ways as it has passes
        return Measured(error=_in_one_line(error))
    cached = _cache_file(compiled, arch)
    if cached.exists():
        values = json.loads(cached.read_text())
        return Measured(**{**values, "tensor_core_names": tuple(values["tensor_core_names"])})
    measured = _measure(compiled, arch)
    _write(cached, measured)
    return measured


def _measure(compiled: Any, arch: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        registers, stack_bytes = parse_resources(_cuobjdump("--dump-resource-usage", file))
        code = MachineCode.parse(_cuobjdump("-sass", file))
    pattern = CHIPS[arch].tensor_core
    return Measured(
        registers=registers,
        stack_bytes=stack_bytes,
        spilled_bytes=code.spilled_bytes,
        shared_bytes=compiled.metadata.shared,
        tensor_memory_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        tensor_core_names=tuple(code.tensor_core_names()),
        num_tensor_core=len(code.in_loops(pattern)),
        num_scalar_products=code.scalar_products(pattern),
        load_widths=dict(code.load_widths()),
        specializes_warps="ttg.warp_specialize" in compiled.asm["ttgir"],
    )


def _cuobjdump(option: str, file: Path) -> str:
    import triton.backends.nvidia as nvidia

    program = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    done = subprocess.run([str(program), option, str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} {option} failed: {done.stderr.strip()}")
    return done.stdout


def _in_one_line(error: Exception) -> str:
    """What went wrong: a compiler's message ends with it, after the source that it quotes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def _cache_file(compiled: Any, arch: str) -> Path:
    from triton import knobs

    # The measuring code itself is part of the key.
    key = hashlib.sha256(compiled.asm["cubin"])
    key.update(str(compiled.metadata.shared).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        key.update(source.read_bytes())
    return Path(knobs.cache.dir) / "relay_measured" / f"{key.hexdigest()}-{arch}.json"


def _write(file: Path, measured: Measured) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as whole:
        json.dump(dataclasses.asdict(measured), whole)
    Path(whole.name).replace(file)
