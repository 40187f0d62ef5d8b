"""Small transformer-like blocks around a relay, and counters of what it does, for tests."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_relay.moe import ExpertWeights, RelayOptions, relay_moe, relay_ring

DIM, EXPERT_DIM, NUM_EXPERTS, TOP_K = 8, 6, 4, 2


class Block(nn.Module):
    """Router, relay, and a residual add; ``post_norm`` puts a norm on the relay's output."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        seed: int,
        post_norm: bool = False,
        circulate: str = "experts",
        num_experts: int = NUM_EXPERTS,
    ) -> None:
        super().__init__()
        self.group, self.post_norm = group, post_norm
        num_ranks = 1 if group is None else group.size()
        rank = 0 if group is None else dist.get_rank(group)
        local = num_experts // num_ranks
        mine = slice(rank * local, (rank + 1) * local)
        random = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random) * shape[-1] ** -0.5

        self.gate = nn.Parameter(weight(num_experts, DIM))
        self.inner = nn.Parameter(weight(DIM, DIM))
        self.shared = nn.Parameter(weight(DIM, DIM))
        self.w1 = nn.Parameter(weight(num_experts, EXPERT_DIM, DIM)[mine].clone())
        self.w2 = nn.Parameter(weight(num_experts, DIM, EXPERT_DIM)[mine].clone())
        self.w3 = nn.Parameter(weight(num_experts, EXPERT_DIM, DIM)[mine].clone())
        self.options = RelayOptions(circulate, layer=f"block{seed}")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        hidden_TD = x_TD + torch.tanh(x_TD @ self.inner)
        normed_TD = nn.functional.rms_norm(hidden_TD, (DIM,))
        scores_TE = torch.softmax(normed_TD @ self.gate.t(), dim=-1)
        scores_TK, ids_TK = scores_TE.topk(TOP_K, dim=-1)
        experts = ExpertWeights(self.w1, self.w2, self.w3)
        out_TD = relay_moe(normed_TD, scores_TK, ids_TK, experts, self.group, self.options)
        out_TD = out_TD + torch.sigmoid(normed_TD @ self.shared)
        if self.post_norm:
            out_TD = nn.functional.rms_norm(out_TD, (DIM,))
        return hidden_TD + out_TD


class OpCounter(TorchDispatchMode):
    """How often each op of the relay reached its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_relay":
            self.calls[func.name()] = self.calls.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def messages_sent(group: dist.ProcessGroup) -> int:
    """Ring messages of this rank since the last call."""
    return sum(counts.num_messages for counts in relay_ring(group).telemetry.take().values())


def gradients_of(blocks, x_TD, run):
    """Gradients of every parameter and of ``x``, after ``run(block, x)`` through all blocks."""
    for block in blocks:
        block.zero_grad(set_to_none=True)
    x_TD = x_TD.clone().requires_grad_()
    out_TD = x_TD
    for block in blocks:
        out_TD = run(block, out_TD)
    out_TD.square().sum().backward()
    gradients = [parameter.grad.clone() for block in blocks for parameter in block.parameters()]
    return out_TD.detach(), [x_TD.grad, *gradients]
