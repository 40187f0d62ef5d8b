"""What a rank must get, in float64: each expert on the rows routed to it, by autograd."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from layer_bench.setting import Inputs, Setting


@dataclass(frozen=True)
class Reference:
    """This rank's output and gradients; ``dweights`` of its own experts, summed over ranks."""

    out_TD: torch.Tensor
    dx_TD: torch.Tensor
    dscores_TK: torch.Tensor
    dweights: list[torch.Tensor]


def reference_of(setting: Setting, inputs: Inputs, group: dist.ProcessGroup) -> Reference:
    """Every rank computes its tokens with all experts, one expert in memory at a time."""
    partial = partial_reference(setting, inputs)
    for total in partial.dweights:
        dist.all_reduce(total, group=group)
    return share_of(partial, setting, dist.get_rank(group))


def share_of(reference: Reference, setting: Setting, rank: int) -> Reference:
    """With the weight gradients of one rank's experts only."""
    first = rank * setting.local_experts
    mine = [total[first : first + setting.local_experts] for total in reference.dweights]
    return Reference(reference.out_TD, reference.dx_TD, reference.dscores_TK, mine)


def partial_reference(setting: Setting, inputs: Inputs) -> Reference:
    """``dweights`` of all experts, from this rank's tokens alone."""
    x_TD = inputs.x_TD.double().requires_grad_()
    scores_TK = inputs.scores_TK.double().requires_grad_()
    out_TD = torch.zeros_like(x_TD)
    dx_TD, dscores_TK = torch.zeros_like(x_TD), torch.zeros_like(scores_TK)
    sums: list[list[torch.Tensor]] = []
    for owner in range(setting.ep):
        weights = [weight.double() for weight in setting.weights(owner)]
        sums.append([torch.zeros_like(weight) for weight in weights])
        for local in range(setting.local_experts):
            w1, w2, w3 = (weight[local].clone().requires_grad_() for weight in weights)
            token, choice = (inputs.ids_TK == owner * setting.local_experts + local).nonzero().T
            hidden = torch.nn.functional.silu(x_TD[token] @ w1.T) * (x_TD[token] @ w3.T)
            y_RD = (hidden @ w2.T) * scores_TK[token, choice, None]
            leaves = (x_TD, scores_TK, w1, w2, w3)
            grads = torch.autograd.grad(y_RD, leaves, inputs.dout_TD.double()[token])
            out_TD = out_TD.detach().index_add(0, token, y_RD.detach())
            dx_TD += grads[0]
            dscores_TK += grads[1]
            for total, grad in zip(sums[-1], grads[2:], strict=True):
                total[local] = grad
    dweights = [torch.cat(of_owner) for of_owner in zip(*sums, strict=True)]
    return Reference(out_TD, dx_TD, dscores_TK, dweights)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected value."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
