"""The knobs of a relay, and their form as one string.

What they are called, may be and mean is declared once, in `RelayKeys`, for runs and for programs.
A registered op takes only tensors, numbers and strings; ``RelayOptions.spec`` is what crosses that
border, and ``options_from_spec`` reads it on the other side.
"""

import functools
import json
from dataclasses import dataclass, field

import torch

from titan_relay.config.errors import ConfigError
from titan_relay.config.fields import option
from titan_relay.config.reader import read_fields
from titan_relay.config.schema_relay import RelayKeys
from titan_relay.moe.errors import RelayUsageError


@dataclass(frozen=True)
class RelayOptions(RelayKeys):
    """Immutable options of ``relay_moe``; equal on every rank of the group.

    Attributes, beyond what `RelayKeys` says of each:
        num_slices: more slices than experts are as many as experts. "auto" cuts the tokens in two,
            because every slice passes over all weights.
        deterministic: weight and score gradients are summed in a fixed order in any case. The
            fused kernels otherwise add a token's parts to outputs and input gradients as they
            come; in a fixed order they write a step's parts first, ``R * D`` elements and 4 bytes
            per routed copy, and pass over them once more.
        max_imbalance: where "auto" means tokens, and a call's routing would let a rank compute more
            than this many times its share, experts circulate in this call; with them every rank
            computes its own tokens' rows. Decided anew by each call's counts, alike on all ranks.
            The peak of memory is then the larger of both rings'.

    Raises:
        RelayUsageError: a value that its key may not have, or two that do not go together.
    """

    check_finite: bool = option(False)
    """Before each forward look for NaN, infinity and repeated expert ids, and raise on every rank.
    Costs a pass over the inputs and, on a device, a synchronisation. Ids out of range are found
    without it."""

    layer: str = option("")
    """The layer's name, for errors and telemetry."""

    # Made once here, not at each call: torch.compile then sees a constant.
    spec: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        try:
            values = read_fields(self, "RelayOptions")
        except ConfigError as error:
            raise RelayUsageError(str(error)) from None
        # One form of a number, so that ranks that mean the same say the same.
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if conflict := self.conflict():
            name, needs = conflict
            raise RelayUsageError(f"RelayOptions: {name} = {values[name]} needs {needs}")
        object.__setattr__(self, "spec", json.dumps(values, sort_keys=True))

    def sum_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights of ``weight_dtype`` are summed."""
        dtype: torch.dtype = getattr(torch, self.grad_dtype)
        return torch.promote_types(dtype, weight_dtype)


@functools.lru_cache(maxsize=1024)
def options_from_spec(spec: str) -> RelayOptions:
    """The inverse of ``RelayOptions.spec``."""
    return RelayOptions(**json.loads(spec))
