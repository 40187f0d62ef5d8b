"""Keys of how tokens meet experts, and of what a block keeps for backward when they do.

`RelayKeys` is the one declaration of what the layer may be told: `[relay]` of a run and
`titan_relay.moe.RelayOptions` are both made from it.
"""

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.fields import option

RetentionLevel = Literal["recompute", "output", "full"]


@dataclass(frozen=True, slots=True)
class RelayKeys:
    """What one layer on the relay may be told; alike on every rank of its ring."""

    circulate: Literal["auto", "experts", "tokens"] = option("auto", titan="")
    """What moves from rank to rank: experts' weights, or blocks of tokens. auto: what sends fewer
    bytes, for forward and backward separately."""

    max_imbalance: float | None = option(None, at_least=1, titan="")
    """For circulate = "auto": experts circulate in a layer's call whose routing would let a rank
    of a ring of tokens compute more than this many times its share. none: bytes alone decide."""

    num_slices: int | Literal["auto"] = option("auto", at_least=1, titan="")
    """The ring runs once per slice of a rank's experts (or tokens), so that its buffers hold
    slices. auto: as many as keep the buffers near two copies of the tokens."""

    max_rows_per_step: int | Literal["auto"] = option("auto", at_least=1, titan="")
    """Routed rows computed at a time; scratch memory is proportional. auto: suits the device."""

    max_tokens_per_rank: int | None = option(None, at_least=1, titan="")
    """The most tokens that a rank's layer may get at once; buffers and choices follow it. Only
    needed where ranks may differ. none: exactly a microbatch's tokens on every rank."""

    grad_dtype: Literal["float32", "bfloat16", "float16", "float64"] = option("float32", titan="")
    """Type in which expert weight gradients are summed on their way round the ring; never narrower
    than the weights' own."""

    kernels: Literal["auto", "triton", "torch"] = option("auto", titan="")
    """What computes the experts: fused Triton kernels or plain PyTorch. auto: Triton on a CUDA
    device of compute capability 8.0 or newer, PyTorch elsewhere."""

    deterministic: bool = option(False, titan="")
    """Sum experts' outputs and input gradients in a fixed order, so that the same step on the same
    ranks gives the same bits. PyTorch's sums, so every run on CPU, have one anyway; Triton's then
    take a pass more over memory and room for max_rows_per_step rows. debug.deterministic = true
    implies it."""

    def conflict(self) -> tuple[str, str] | None:
        """A key that the others leave nothing to decide, and what it needs; None where all fit."""
        if self.max_imbalance is not None and self.circulate != "auto":
            return "max_imbalance", 'circulate = "auto"'
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig(RelayKeys):
    """How tokens and experts meet when experts are split over ranks."""

    dispatcher: Literal["relay", "alltoall"] = option("relay", titan="override")
    """relay: experts (or tokens) travel round a ring of the EP ranks. alltoall: every routed copy
    of a token is sent to its expert's rank. Checkpoints fit both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRetentionConfig:
    """What each block keeps for backward, with relay.dispatcher = "relay".

    The experts' half keeps nothing at all, so what is left to choose is attention. With
    relay.dispatcher = "alltoall" see [activation_checkpoint] instead.
    """

    mode: Literal["auto", "recompute", "output", "full"] = option("recompute", titan="")
    """recompute: keep each block's input and which experts were chosen, nothing else. output: also
    attention's output and log-sum-exp, so that its kernel is not run again. full: also the
    projections into queries, keys and values. auto: what saves most time within budget_gib."""

    layers: tuple[RetentionLevel, ...] | None = option(None, not_empty=True, titan="")
    """A level for every layer of the model, first to last, such as the list that a run with mode =
    "auto" logs. none: mode decides."""

    budget_gib: float | Literal["auto"] = option(
        "auto", at_least=0, titan="", needs='mode = "auto"', request=True
    )
    """For mode = "auto": GiB per rank that may be spent on what levels output and full keep. auto:
    what the peak of the second step leaves of the memory, less safety_margin; until then nothing
    is kept."""

    safety_margin: float = option(
        0.1,
        at_least=0,
        below=1,
        titan="",
        needs=('mode = "auto"', 'block_inputs = "auto"'),
        request=True,
    )
    """For budget_gib and block_inputs = "auto": share of the memory that stays free."""

    block_inputs: Literal["device", "host", "auto"] = option("device", titan="")
    """Where each block's input waits for backward. host: in host memory, pinned beside a GPU;
    copied there while the next block computes, and fetched a block ahead in backward. auto: as
    host for two steps; then those come back for which the second step's peak leaves room, less
    safety_margin."""

    host_budget_gib: float | None = option(None, above=0, titan="")
    """For block_inputs = "host" and "auto": GiB of host memory per rank. Inputs for which there is
    no room stay on the device, those of the last blocks."""
