"""The relay as a citizen of autograd: what is saved, what is skipped, what is refused."""

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import call_relay, local_weights
from tests.support.blocks import OpCounter, messages_sent
from tests.support.distributed import run_ranks, subgroup
from tests.support.moe_cases import MoeCase
from titan_relay.moe import RelayOptions, relay_ops

CASE = MoeCase(num_ranks=1, num_tokens=9)
EXPERTS = RelayOptions(circulate="experts")


def leaves(case=CASE, rank=0):
    data = case.data(rank)
    x_TD, scores_TK = data.x_TD.requires_grad_(), data.scores_TK.requires_grad_()
    return x_TD, scores_TK, data.ids_TK, *local_weights(case, rank)


def saved_bytes(inputs, group=None):
    """Bytes saved for backward beyond the op's own inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    extra = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            extra[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_TD = call_relay(inputs, group)
    return out_TD, sum(extra.values())


def test_saved_for_backward_is_the_inputs_and_four_bytes_per_routed_copy():
    inputs = leaves()
    _, extra = saved_bytes(inputs)
    counts_bytes = 8 * (CASE.num_experts + 2)
    assert extra == 4 * CASE.num_tokens * CASE.top_k + counts_bytes


def test_no_grad_saves_nothing_and_builds_no_graph():
    inputs = leaves()
    with torch.no_grad():
        out_TD, extra = saved_bytes(inputs)
    assert extra == 0
    assert out_TD.grad_fn is None


def test_double_forward_before_backward_and_retained_graph():
    inputs = leaves()
    first = call_relay(inputs)
    second = call_relay(inputs)
    second.sum().backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in inputs if tensor.grad is not None]
    second.sum().backward()
    first.sum().backward()
    for tensor, wanted in zip([t for t in inputs if t.grad is not None], once, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * wanted)


def test_second_order_gradient_is_refused_clearly():
    x_TD, *rest = leaves()
    out_TD = call_relay([x_TD, *rest])
    (dx_TD,) = torch.autograd.grad(out_TD.sum(), x_TD, create_graph=True)
    with pytest.raises(RuntimeError, match="no second-order gradient"):
        dx_TD.sum().backward()


@pytest.mark.parametrize("wanted", [(0,), (1,), (3, 4, 5), (0, 3), (5,)])
def test_only_the_gradients_asked_for(wanted):
    everything = leaves()
    call_relay(everything).square().sum().backward()
    some = [tensor.detach() for tensor in everything]
    for index in wanted:
        some[index].requires_grad_()
    call_relay(some).square().sum().backward()
    for index, (mine, full) in enumerate(zip(some, everything, strict=True)):
        if index in wanted:
            torch.testing.assert_close(mine.grad, full.grad)
        else:
            assert mine.grad is None


def test_expanded_and_transposed_output_gradients():
    inputs = leaves()
    out_TD = call_relay(inputs)
    expected = torch.autograd.grad(out_TD, inputs[0], torch.ones(out_TD.shape), retain_graph=True)
    expanded = torch.ones(()).expand(out_TD.shape)
    assert torch.equal(
        torch.autograd.grad(out_TD, inputs[0], expanded, retain_graph=True)[0], expected[0]
    )
    transposed = torch.ones(out_TD.shape[::-1]).t()
    assert torch.equal(torch.autograd.grad(out_TD, inputs[0], transposed)[0], expected[0])


def test_non_contiguous_inputs():
    inputs = [tensor.detach() for tensor in leaves()]
    expected = call_relay(inputs)

    def scrambled(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    actual = call_relay([scrambled(tensor) for tensor in inputs])
    torch.testing.assert_close(actual, expected)


def test_gradients_accumulate_over_micro_batches():
    inputs = leaves()
    call_relay(inputs).sum().backward()
    first = inputs[3].grad.clone()
    call_relay(inputs).sum().backward()
    torch.testing.assert_close(inputs[3].grad, 2 * first)


def test_ops_pass_opcheck():
    x_TD, scores_TK, ids_TK, w1, w2, w3 = leaves()
    route, moe = relay_ops()
    torch.library.opcheck(route, (ids_TK, CASE.num_experts, 3, 4, "auto"))
    rows_N, counts = route(ids_TK, CASE.num_experts, 1, CASE.num_tokens, "auto")
    static = ("", RelayOptions().spec, [1.0, float("inf"), 0.0])
    args = (x_TD, scores_TK, rows_N, counts, w1, w2, w3, None, None, None, *static)
    torch.library.opcheck(moe, args)


def test_autograd_sees_three_opaque_ops():
    inputs = leaves()
    with OpCounter() as counter:
        call_relay(inputs).sum().backward()
    assert counter.calls == {
        "titan_relay::route": 1,
        "titan_relay::moe": 1,
        "titan_relay::moe_backward": 1,
    }


def _check_frozen_experts():
    group = subgroup([0, 1])
    case = MoeCase(num_ranks=2)
    rank = dist.get_rank()
    inputs = leaves(case, rank)
    call_relay(inputs, group, EXPERTS).sum().backward()
    with_chain = messages_sent(group)
    expected = inputs[0].grad.clone()
    frozen = [tensor.detach() for tensor in inputs]
    frozen[0].requires_grad_()
    call_relay(frozen, group, EXPERTS).sum().backward()
    assert torch.equal(frozen[0].grad, expected)
    # Forward 3 messages, backward 3 with the weights and 3 with their gradients, per slice.
    assert messages_sent(group) == with_chain * 2 // 3


def test_frozen_experts_send_no_gradients():
    run_ranks(_check_frozen_experts, 2)
