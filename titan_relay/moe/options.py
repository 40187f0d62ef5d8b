"""The knobs of a relay, and their form as one string.

A registered op takes only tensors, numbers and strings; ``RelayOptions.spec`` is what crosses that
border, and ``options_from_spec`` reads it on the other side.
"""

import functools
import json
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from relay_kernels.choice import KERNELS, Kernels
from titan_relay.moe.errors import RelayUsageError

AUTO: Literal["auto"] = "auto"

_GRAD_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class RelayOptions:
    """Immutable options of ``relay_moe``; equal on every rank of the group.

    Attributes:
        circulate: "experts" (weights go round, tokens stay), "tokens" (the reverse), or "auto",
            which takes the one that sends fewer bytes, for forward and backward separately.
        num_slices: the ring runs once per slice (of a rank's experts, or of its tokens), so that
            ring buffers hold slices rather than whole shares. More slices than experts are as
            many as experts. "auto" keeps a ring of experts' buffers near two copies of the
            tokens, and cuts the tokens in two, because every slice passes over all weights.
        max_rows_per_step: rows computed at a time; the step's scratch memory is proportional.
            "auto" suits the device.
        max_tokens_per_rank: the most tokens that any rank has. Given, ranks may have different
            numbers of tokens, and choices and buffers follow this one; None: all have the same.
        grad_dtype: the dtype in which weight gradients travel and are summed: "float32",
            "bfloat16", "float16" or "float64". Never narrower than the weights' own.
        kernels: "triton" (fused kernels on CUDA), "torch" (plain PyTorch), or "auto": Triton on a
            CUDA device that has it, PyTorch elsewhere.
        deterministic: sum in a fixed order, so that the same call gives the same bits again. That
            is so in any case in plain PyTorch, and for weight and score gradients. The fused
            kernels otherwise add a token's parts to outputs and input gradients as they come; in a
            fixed order they write a step's parts first, ``R * D`` elements and 4 bytes per routed
            copy, and pass over them once more.
        check_finite: before each forward look for NaN, infinity and repeated expert ids, and
            raise on every rank. Costs a pass over the inputs and, on a device, a synchronisation.
            Ids out of range are found without it.
        layer: the layer's name, for errors and telemetry.
        max_imbalance: a ring of tokens works at the pace of the rank whose experts get the most
            rows. Given, at least 1: where "auto" means tokens, and this call's routing would let
            a rank compute more than this many times its share, experts circulate in this call;
            with them every rank computes its own tokens' rows. Decided anew by each call's
            counts, alike on all ranks. The peak of memory is then the larger of both rings'.
    """

    circulate: Literal["auto", "experts", "tokens"] = AUTO
    num_slices: int | Literal["auto"] = AUTO
    max_rows_per_step: int | Literal["auto"] = AUTO
    max_tokens_per_rank: int | None = None
    grad_dtype: str = "float32"
    kernels: Kernels = AUTO
    deterministic: bool = False
    check_finite: bool = False
    layer: str = ""
    max_imbalance: float | None = None
    # Made once here, not at each call: torch.compile then sees a constant.
    spec: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.circulate not in ("auto", "experts", "tokens"):
            raise RelayUsageError(
                f"RelayOptions: circulate = {self.circulate!r} must be one of "
                "'auto', 'experts', 'tokens'"
            )
        self._check_max_imbalance()
        _check_count("num_slices", self.num_slices)
        _check_count("max_rows_per_step", self.max_rows_per_step)
        if self.max_tokens_per_rank is not None:
            _check_count("max_tokens_per_rank", self.max_tokens_per_rank, word=None)
        for name in ("deterministic", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise RelayUsageError(
                    f"RelayOptions: {name} = {getattr(self, name)!r} must be True or False"
                )
        if not isinstance(self.layer, str):
            raise RelayUsageError(f"RelayOptions: layer = {self.layer!r} must be a string")
        if self.grad_dtype not in _GRAD_DTYPES:
            raise RelayUsageError(
                f"RelayOptions: grad_dtype = {self.grad_dtype!r} must be one of "
                f"{', '.join(_GRAD_DTYPES)}"
            )
        if self.kernels not in KERNELS:
            raise RelayUsageError(
                f"RelayOptions: kernels = {self.kernels!r} must be one of "
                f"{', '.join(repr(each) for each in KERNELS)}"
            )
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        object.__setattr__(self, "spec", json.dumps(values, sort_keys=True))

    def _check_max_imbalance(self) -> None:
        value = self.max_imbalance
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
            raise RelayUsageError(
                f"RelayOptions: max_imbalance = {value!r} must be None or a number of at least 1"
            )
        # One form of a number, so that ranks that mean the same say the same.
        object.__setattr__(self, "max_imbalance", float(value))
        if self.circulate != AUTO:
            raise RelayUsageError(
                f"RelayOptions: max_imbalance = {value!r} needs circulate = 'auto', not "
                f"{self.circulate!r}, which leaves nothing to decide"
            )

    def sum_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights of ``weight_dtype`` are summed."""
        return torch.promote_types(_GRAD_DTYPES[self.grad_dtype], weight_dtype)


@functools.lru_cache(maxsize=1024)
def options_from_spec(spec: str) -> RelayOptions:
    """The inverse of ``RelayOptions.spec``."""
    return RelayOptions(**json.loads(spec))


def _check_count(name: str, value: object, word: str | None = AUTO) -> None:
    if word is not None and value == word:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RelayUsageError(
            f"RelayOptions: {name} = {value!r} must be {word!r} or an integer of at least 1"
        )
