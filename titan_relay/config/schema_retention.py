"""Keys of what a block keeps between forward and backward when its experts meet on the relay."""

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.option import option

RetentionLevel = Literal["recompute", "output", "full"]


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

    budget_gib: float | Literal["auto"] = option("auto", at_least=0, titan="")
    """For mode = "auto": GiB per rank that may be spent on what levels output and full keep. auto:
    what the peak of the second step leaves of the memory, less safety_margin; until then nothing
    is kept."""

    safety_margin: float = option(0.1, at_least=0, below=1, titan="")
    """For budget_gib and block_inputs = "auto": share of the memory that stays free."""

    block_inputs: Literal["device", "host", "auto"] = option("device", titan="")
    """Where each block's input waits for backward. host: in host memory, pinned beside a GPU;
    copied there while the next block computes, and fetched a block ahead in backward. auto: as
    host for two steps; then those come back for which the second step's peak leaves room, less
    safety_margin."""

    host_budget_gib: float | None = option(None, above=0, titan="")
    """For block_inputs = "host" and "auto": GiB of host memory per rank. Inputs for which there is
    no room stay on the device, those of the last blocks."""
