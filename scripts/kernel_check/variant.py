"""One kernel with types, constants and options fixed: something to compile for a chip not here."""

from dataclasses import dataclass
from typing import Any

_WARP_THREADS = 32


@dataclass(frozen=True)
class KernelVariant:
    """One kernel with types, constants and options fixed.

    Attributes:
        name: ``KERNEL/LAYER/DTYPE``.
        function: the ``triton.jit`` function.
        signature: argument to Triton type ("*bf16", "i32", "constexpr").
        constexprs: values of the "constexpr" arguments.
        divisible_by_16: arguments known to be.
        needs_tensor_cores: its main loop must have tensor-core instructions.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int
    needs_tensor_cores: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two variants that compile to the same."""
        return (
            self.function.__name__,
            tuple(sorted(self.signature.items())),
            tuple(sorted(self.constexprs.items(), key=str)),
            self.divisible_by_16,
            self.num_warps,
            self.num_stages,
        )

    def compile(self, arch: str) -> Any:
        """Triton's compiled kernel (``asm["cubin"]``, ``metadata``) for "sm_90" and the like."""
        import triton  # only here: the script explains itself without it
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.function.arg_names
        attributes = {
            (names.index(name),): [["tt.divisibility", 16]] for name in self.divisible_by_16
        }
        source = ASTSource(self.function, self.signature, self.constexprs, attributes)
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), _WARP_THREADS)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(source, target=target, options=options)
