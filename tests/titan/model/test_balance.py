"""Balancing losses and load counts: once per training token, whatever is cut or recomputed."""

import pytest
import torch
from torch import nn

from tests.titan.tiny import apply_model, counts_of, row_positions, tiny_config, tiny_model
from titan_relay.config.schema import ActivationCheckpointConfig
from titan_relay.titan.model.balance import BalanceLoss, LoadMeter, StepContext, count_assignments
from titan_relay.titan.model.balance_hook import moe_layers
from titan_relay.titan.model.router import Routing
from titan_relay.titan.recompute.activation_checkpoint import build_activation_checkpoint

TOP_K = 2


def routing(logits_BLE: torch.Tensor, top_k: int = TOP_K) -> Routing:
    probs = logits_BLE.softmax(-1)
    scores, ids = probs.topk(top_k, dim=-1)
    return Routing(scores, ids, probs, logits_BLE)


def router_gradients(model: nn.Module) -> torch.Tensor:
    return torch.stack([moe.router.gate.weight.grad for _, moe in moe_layers([model])])


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_each_training_token_is_counted_once_whatever_is_recomputed(mode: str) -> None:
    model = tiny_model(tiny_config(aux_loss_coeff=0.01))
    policy = build_activation_checkpoint(ActivationCheckpointConfig(mode=mode))
    if policy is not None:
        policy.build().apply(model)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    apply_model(model, tokens, row_positions(2, 16)).sum().backward()
    assert counts_of(model).sum(dim=1).tolist() == [2 * 16 * TOP_K] * 2


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_counted_in_evaluation(grad: bool) -> None:
    model = tiny_model().eval()
    with torch.set_grad_enabled(grad):
        out = apply_model(model, torch.zeros(1, 8, dtype=torch.long), row_positions(1, 8))
    if grad:
        out.sum().backward()
    assert counts_of(model).sum() == 0


@pytest.mark.parametrize("seq_len", [8, 6])  # 6: as many tokens as experts
def test_padding_is_not_load(seq_len: int) -> None:
    model = tiny_model(tiny_config(aux_loss_coeff=0.01))
    num_pads = seq_len - 2
    positions = row_positions(2, seq_len, num_pads)
    apply_model(model, torch.zeros(2, seq_len, dtype=torch.long), positions).sum().backward()
    assert counts_of(model).sum(dim=1).tolist() == [2 * 2 * TOP_K] * 2


def test_padding_changes_neither_loss_value() -> None:
    loss = BalanceLoss(6, 1.0, 1.0, "sequence")
    logits = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(2))
    valid = torch.zeros(2, 8, dtype=torch.bool)
    valid[:, :3] = True
    padded, alone = LoadMeter(6), LoadMeter(6)
    for meter, part, mask in [(padded, logits, valid), (alone, logits[:, :3], valid[:, :3])]:
        scores = loss.attach(routing(part.clone().requires_grad_()), mask, StepContext(), meter)
        scores.sum().backward()
    # Sums of the same numbers in the same order but for zeros in between: a few ulp.
    torch.testing.assert_close(
        padded.read(torch.device("cpu")), alone.read(torch.device("cpu")), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("num_microbatches", [4])
def test_router_gradient_does_not_depend_on_the_number_of_microbatches(
    scope: str, num_microbatches: int
) -> None:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(3))
    gradients = []
    for repeats in (1, num_microbatches):
        model = tiny_model(tiny_config(aux_loss_coeff=1.0, z_loss_coeff=0.1, aux_loss_scope=scope))
        for _, moe in moe_layers([model]):
            moe.step_context = StepContext(num_valid_tokens=torch.tensor(32 * repeats))
        for _ in range(repeats):
            (apply_model(model, tokens, row_positions(2, 16)).sum() * 0).backward()
        gradients.append(router_gradients(model))
    assert gradients[0].abs().max() > 0
    # The same float32 gradient divided by 4 and added 4 times.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-9)


def test_losses_equal_their_definitions() -> None:
    """Against a float64 loop that shares no code with the implementation."""
    num_experts, coeff = 5, 0.3
    logits = torch.randn(3, 7, num_experts, generator=torch.Generator().manual_seed(4))
    x = logits.clone().requires_grad_()
    meter = LoadMeter(num_experts)
    loss = BalanceLoss(num_experts, coeff, 0.2, "sequence")
    route = routing(x)
    scores = loss.attach(route, torch.ones(3, 7, dtype=torch.bool), StepContext(), meter)
    (scores * 0).sum().backward()

    y = logits.double().requires_grad_()
    aux = torch.zeros((), dtype=torch.float64)
    z = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        for t in range(7):
            p = [y[b, t, e].exp() / y[b, t].exp().sum() for e in range(num_experts)]
            for e in range(num_experts):
                chosen = int((route.expert_ids_BLK[b] == e).sum())
                aux = aux + num_experts * chosen / (7 * TOP_K) * p[e] / 21
            z = z + torch.log(y[b, t].exp().sum()) ** 2 / 21
    (coeff * aux + 0.2 * z).backward()
    # float32 against float64 over about a hundred additions.
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-8)
    values = meter.read(torch.device("cpu"))
    torch.testing.assert_close(values[-3:-1], torch.stack([aux, z]).detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_routers_get_the_gradient_of_both_losses_by_their_coefficients(
    scope: str, score_func: str
) -> None:
    """Through both layers, with padding; against autograd over the definition, by tokens."""
    kind = {"aux_loss_scope": scope, "score_func": score_func}
    model = tiny_model(tiny_config(aux_loss_coeff=0.3, z_loss_coeff=0.02, **kind))
    plain = tiny_model(tiny_config(aux_loss_coeff=0.0, z_loss_coeff=0.0, **kind))
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(5))
    positions = row_positions(2, 12)
    positions[1, 7:] = -1
    (apply_model(model, tokens, positions) * 0).sum().backward()

    routings: list[Routing] = []
    for _, moe in moe_layers([plain]):
        moe.router.register_forward_hook(lambda _, __, routing: routings.append(routing))
    apply_model(plain, tokens, positions)
    losses = [_balance_loss(each, positions >= 0, scope, score_func) for each in routings]
    gates = [moe.router.gate.weight for _, moe in moe_layers([plain])]
    expected = torch.stack(torch.autograd.grad(sum(losses), gates))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(router_gradients(model), expected, rtol=1e-4, atol=1e-7)


def _balance_loss(
    routing: Routing, valid_BL: torch.Tensor, scope: str, score_func: str
) -> torch.Tensor:
    """0.3 of the auxiliary loss and 0.02 of the z-loss, token by token."""
    ids, (num_rows, _, num_experts) = routing.expert_ids_BLK, routing.logits_BLE.shape
    aux = z = torch.zeros((), dtype=torch.float64)
    for row in range(num_rows):
        rows = [row] if scope == "sequence" else range(num_rows)
        chosen = [e for each in rows for e in ids[each][valid_BL[each]].flatten().tolist()]
        for logits in routing.logits_BLE[row][valid_BL[row]].double():
            p = logits.exp() if score_func == "softmax" else logits.sigmoid()
            for e in range(num_experts):
                aux = aux + num_experts * chosen.count(e) / len(chosen) * p[e] / p.sum()
            z = z + logits.exp().sum().log() ** 2
    return (0.3 * aux + 0.02 * z) / valid_BL.sum()


def test_balanced_routing_has_loss_one_and_all_to_one_more() -> None:
    loss = BalanceLoss(4, 1.0, 0.0, "sequence")
    balanced = 9.0 * torch.eye(4).repeat(4, 1).unsqueeze(0)
    to_one = torch.zeros(1, 16, 4)
    to_one[..., 2] = 9.0
    values = []
    for logits in (balanced, to_one):
        meter = LoadMeter(4)
        scores = loss.attach(
            routing(logits.requires_grad_(), top_k=1),
            torch.ones(1, 16, dtype=torch.bool),
            StepContext(),
            meter,
        )
        scores.sum().backward()
        values.append(meter.read(torch.device("cpu"))[-3].item())
    assert values[0] == pytest.approx(1.0, rel=1e-6)
    assert values[1] > 3.9


def test_count_assignments_docstring_example() -> None:
    ids = torch.tensor([[[0], [2], [2]]])
    valid = torch.tensor([[True, True, False]])
    assert count_assignments(ids, valid, 3).tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_with_near_tied_logits_gives_the_same_gradients(mode: str) -> None:
    tokens = torch.zeros(1, 32, dtype=torch.long)  # copies of one token: every logit is a near tie
    gradients = []
    for each in ("none", mode):
        model = tiny_model(tiny_config(aux_loss_coeff=0.01))
        for _, moe in moe_layers([model]):
            moe.router.gate.weight.data.mul_(1e-6)
        policy = build_activation_checkpoint(ActivationCheckpointConfig(mode=each))
        if policy is not None:
            policy.build().apply(model)
        apply_model(model, tokens, row_positions(1, 32)).square().sum().backward()
        gradients.append(router_gradients(model))
    assert torch.equal(gradients[0], gradients[1])


def test_a_nan_logit_still_routes_to_distinct_valid_experts() -> None:
    model = tiny_model()
    _, moe = next(moe_layers([model]))
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(5))
    x[0, 2, 0] = float("nan")
    ids = moe.router(x).expert_ids_BLK
    assert ((ids >= 0) & (ids < 6)).all()
    assert all(len(set(row)) == TOP_K for row in ids[0].tolist())
