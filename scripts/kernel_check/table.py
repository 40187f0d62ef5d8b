"""The measurements as a table, worst first within a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_check.chips import CHIPS
from kernel_check.compile import Measured
from kernel_check.judge import faults
from kernel_check.variant import KernelVariant

_HEADER = (
    "kernel", "arch", "configuration", "regs", "spill B", "stack B", "shared KiB", "tensor cores",
    "loads (bits)", "",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One variant on one architecture."""

    name: str
    arch: str
    configuration: str
    measured: Measured
    faults: Sequence[str]

    @staticmethod
    def of(variant: KernelVariant, arch: str, measured: Measured) -> "Row":
        found = faults(
            measured,
            CHIPS[arch],
            needs_tensor_cores=variant.needs_tensor_cores,
            specializes_warps=bool(variant.constexprs.get("WARP_SPECIALIZE", False)),
        )
        return Row(variant.name, arch, _configuration(variant), measured, found)

    def cells(self) -> tuple[str, ...]:
        m = self.measured
        if m.error:
            numbers = ("", "", "", "", "", "")
        else:
            numbers = (
                str(m.registers), str(m.spilled_bytes), str(m.stack_bytes),
                f"{m.shared_bytes / 1024:.1f}", _tensor_cores(m, self.arch), _loads(m),
            )  # fmt: skip
        verdict = "FAIL" if self.faults else "ok"
        return (self.name, self.arch, self.configuration, *numbers, verdict)

    def fault_lines(self) -> list[str]:
        where = f"{self.name} ({self.configuration}) on {self.arch}"
        return [f"error: {where} {fault}" for fault in self.faults]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table that is also aligned as text."""
    lines = [_HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [_line(line, widths) for line in lines]
    text.insert(1, _line(["-" * width for width in widths], widths))
    return "\n".join(text)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"


def _configuration(variant: KernelVariant) -> str:
    """Tile sizes and the compiler's options; the rest follows from the layer in the name."""
    tile = [
        f"{name.removeprefix('BLOCK_')}{value}"
        for name, value in variant.constexprs.items()
        if name.startswith("BLOCK")
    ]
    specialized = " specialized" if variant.constexprs.get("WARP_SPECIALIZE") else ""
    return f"{' '.join(tile)} warps{variant.num_warps}{specialized} stages{variant.num_stages}"


def _tensor_cores(measured: Measured, arch: str) -> str:
    if measured.num_tensor_core:
        return f"{measured.num_tensor_core} {CHIPS[arch].tensor_core_name}"
    return "none" if not measured.tensor_core_names else ", ".join(measured.tensor_core_names)


def _loads(measured: Measured) -> str:
    widest_first = sorted(
        measured.load_widths.items(), key=lambda item: -int(item[0]) if item[0].isdigit() else -999
    )
    return ", ".join(f"{count}x{width}" for width, count in widest_first)
