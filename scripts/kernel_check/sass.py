"""Read what ``cuobjdump`` says of a cubin: resources, and what the machine code does in loops."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kernel_check.loops import Instruction, Loop, find_loops, innermost

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE
)
# Local memory is where registers go that do not fit.
_STORE_LOCAL = re.compile(r"STL\b")
# Loads from global memory: into registers, into shared memory, and by the copy engine (TMA).
_GLOBAL_LOAD = re.compile(r"(?:LDG|LDGSTS|UTMALDG|UBLKCP)\b")
_BY_COPY_ENGINE = re.compile(r"(?:UTMALDG|UBLKCP)\b")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
# Tensor-core instructions of every generation.
_ANY_TENSOR_CORE = re.compile(r"(?:[HIDQO]MMA|[HIQ]GMMA|UTC[A-Z]*MMA)\b")
_MULTIPLY_ADD = re.compile(r"(?:FFMA2?|DFMA|HFMA2)\b")


@dataclass(frozen=True)
class MachineCode:
    """One kernel's instructions in order of address."""

    instructions: Sequence[Instruction]

    @staticmethod
    def parse(text: str) -> "MachineCode":
        """From the output of ``cuobjdump -sass``."""
        return MachineCode(
            [
                Instruction(int(address, 16), bool(condition), name, operands)
                for address, condition, name, operands in _LINE.findall(text)
            ]
        )

    @cached_property
    def loops(self) -> list[Loop]:
        return find_loops(self.instructions)

    def matching(self, pattern: re.Pattern[str]) -> list[Instruction]:
        return [each for each in self.instructions if pattern.match(each.name)]

    def in_loops(self, pattern: re.Pattern[str]) -> list[Instruction]:
        """Those within any loop, each once."""
        repeated = frozenset().union(*self.loops)
        return [each for each in self.matching(pattern) if each.address in repeated]

    @property
    def spilled_bytes(self) -> int:
        """Bytes per thread that stores to local memory write, each place in the code once."""
        return sum(width_bits(each) for each in self.matching(_STORE_LOCAL)) // 8

    def scalar_products(self, tensor_core: re.Pattern[str]) -> int:
        """The most ordinary multiply-adds in an innermost loop without tensor-core instructions."""
        multiply_adds = {each.address for each in self.matching(_MULTIPLY_ADD)}
        products = {each.address for each in self.matching(tensor_core)}
        counts = [
            len(loop & multiply_adds) for loop in innermost(self.loops) if not loop & products
        ]
        return max(counts, default=0)

    def tensor_core_names(self) -> list[str]:
        """The kinds of tensor-core instructions, wherever they stand."""
        return sorted({each.name for each in self.matching(_ANY_TENSOR_CORE)})

    def load_widths(self) -> Counter[str]:
        """Loads from global memory in loops, by bits per thread or "TMA"."""
        return Counter(
            "TMA" if _BY_COPY_ENGINE.match(each.name) else str(width_bits(each))
            for each in self.in_loops(_GLOBAL_LOAD)
        )


def width_bits(instruction: Instruction) -> int:
    """Bits that one thread moves; an access that names no width moves 32."""
    for modifier in reversed(instruction.name.split(".")[1:]):
        if modifier in _WIDTHS:
            return _WIDTHS[modifier]
    return 32


def parse_resources(text: str) -> tuple[int, int]:
    """Registers and stack bytes per thread, from ``cuobjdump --dump-resource-usage``."""
    found = _RESOURCES.search(text)
    if found is None:
        raise ValueError(f"cuobjdump told nothing about resources: {text.strip()[:200]!r}")
    return int(found[1]), int(found[2])
