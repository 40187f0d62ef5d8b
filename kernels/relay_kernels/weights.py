"""The weights of some consecutive experts, and where gradients go.

Shape legend: T tokens, K top-k, g experts held together (a rank's share, or a slice of it), D model
dimension, F expert hidden dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from relay_kernels.rows import Segment


@dataclass(frozen=True)
class ExpertWeights:
    """One expert is ``W2 act(W1 x + b1, W3 x + b3) + b2``; biases are all given or all None.

    ``act`` is ``SwiGLU``. All tensors have one dtype and any strides. The same class holds
    gradients, where the tensors are buffers of the same shapes.
    """

    w1_gFD: torch.Tensor
    w2_gDF: torch.Tensor
    w3_gFD: torch.Tensor
    b1_gF: torch.Tensor | None = None
    b2_gD: torch.Tensor | None = None
    b3_gF: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.w1_gFD.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are there, always in the same order (the order of messages)."""
        return [tensor for tensor in self.arguments() if tensor is not None]

    def arguments(self) -> list[torch.Tensor | None]:
        """All six in the same order, as ops take them."""
        return [self.w1_gFD, self.w2_gDF, self.w3_gFD, self.b1_gF, self.b2_gD, self.b3_gF]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ExpertWeights":
        mapped = [function(tensor) for tensor in self.tensors()]
        return ExpertWeights(*mapped)

    def experts(self, first: int, last: int) -> "ExpertWeights":
        """A view of experts ``first <= j < last``."""
        return self.map(lambda tensor: tensor[first:last])

    def empty_like(self, num_experts: int, dtype: torch.dtype | None = None) -> "ExpertWeights":
        """Uninitialised buffers for ``num_experts`` experts."""
        return self.map(
            lambda tensor: tensor.new_empty(
                (num_experts, *tensor.shape[1:]), dtype=dtype or tensor.dtype
            )
        )


@dataclass(frozen=True)
class Gradients:
    """Where gradients go; None means that nobody asks for that one, and its work is left out.

    ``dx_TD`` is summed into and ``dscores_TK`` (contiguous) is written. ``weights`` is summed into
    if ``accumulate_weights``, and otherwise overwritten (with zeros for an expert without rows).
    """

    dx_TD: torch.Tensor | None
    dscores_TK: torch.Tensor | None
    weights: ExpertWeights | None
    accumulate_weights: bool = False

    def begin_idle_experts(self, segments: Sequence[Segment]) -> None:
        """Zeros for the weights of experts without rows, unless gradients are summed into."""
        if self.weights is None or self.accumulate_weights:
            return
        for expert, (start, end) in enumerate(segments):
            if start == end:
                for tensor in self.weights.tensors():
                    tensor[expert].zero_()
