"""Which implementation computes: the Triton kernels or plain PyTorch."""

import functools
import importlib
import importlib.util
import os

import torch

KERNELS = ("auto", "triton", "torch")

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)


class KernelChoiceError(ValueError):
    """The implementation asked for cannot run here; one line says why and what to do."""


def uses_triton(kernels: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True for the Triton kernels, False for plain PyTorch.

    "auto" takes Triton on a CUDA device that has it (compute capability 8.0 and newer) and
    PyTorch elsewhere; "triton" on a CPU runs under Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        KernelChoiceError: an unknown name, or "triton" where it cannot run.
    """
    if kernels not in KERNELS:
        raise KernelChoiceError(f"kernels = {kernels!r} must be one of {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return False  # and triton need not even be installed
    reason = why_not_triton(device, dtype)
    if reason and kernels == "triton":
        raise KernelChoiceError(
            f'kernels = "triton" cannot be used: {reason}; use kernels = "auto" or "torch"'
        )
    return not reason


def is_interpreted() -> bool:
    """Triton's interpreter is on; decided by the environment before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Why the Triton kernels cannot run on these tensors, or ""."""
    if dtype not in TRITON_DTYPES:
        return f"it does not compute in {dtype}"
    if device.type == "cuda" and not torch.cuda.is_available():
        # Only a plan for another machine has such a device; it is taken to be able.
        return ""
    if not _has_triton():
        return "the package triton is not installed"
    if is_interpreted():
        return why_not_interpreted(_version("triton"), _version("numpy"))
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type}, and it runs on CUDA devices"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the device's compute capability {capability} is older than {_LEAST_CAPABILITY}"
    return ""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not_interpreted(triton: tuple[int, ...], numpy: tuple[int, ...]) -> str:
    """Why these versions do not serve Triton's interpreter, or ""."""
    if triton < (3, 7) and numpy >= (2, 4):  # it makes integers of arrays with one element
        return "the interpreter of triton 3.6 needs numpy older than 2.4"
    return ""


@functools.cache
def _version(package: str) -> tuple[int, ...]:
    # The module's own: triton has come in distributions of other names.
    version: str = importlib.import_module(package).__version__
    return tuple(int(part) for part in version.split(".")[:2])
