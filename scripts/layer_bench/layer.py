"""What every implementation of the layer is to the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# (x_TD, scores_TK, ids_TK) -> out_TD
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Layer:
    """A layer with its parameters, and how to read its gradients and traffic back."""

    name: str
    forward: Forward
    parameters: list[torch.Tensor]
    weight_gradients: Callable[[], list[torch.Tensor]]  # of w1_eFD, w2_eDF, w3_eFD
    relay_group: dist.ProcessGroup | None = None
    keep: list[Any] = field(default_factory=list)


def grads_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients that must exist."""
    grads = [parameter.grad for parameter in parameters]
    return [grad for grad in grads if grad is not None]
