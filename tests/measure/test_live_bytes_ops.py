"""LiveBytes and operators written in Python, fake tensors, other dispatch modes, wrappers.

The operators allocate a large temporary and free it again: only a tracker that looks inside sees
it. float32, so n elements are 4n bytes.
"""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_relay.measure import LiveBytes

NUM_TEMPORARY = 1000
NUM_BACKWARD_TEMPORARY = 3000


@torch.library.custom_op("live_bytes_test::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    temporary = torch.ones(NUM_TEMPORARY)
    first = temporary[0].clone()
    del temporary
    return x * first


@scale.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    temporary = x.new_empty(NUM_TEMPORARY)
    del temporary
    return torch.empty_like(x)


@torch.library.custom_op("live_bytes_test::scale_backward", mutates_args=())
def scale_backward(grad: torch.Tensor) -> torch.Tensor:
    temporary = torch.ones(NUM_BACKWARD_TEMPORARY)
    del temporary
    return grad.clone()


@scale_backward.register_fake
def _(grad: torch.Tensor) -> torch.Tensor:
    temporary = grad.new_empty(NUM_BACKWARD_TEMPORARY)
    del temporary
    return torch.empty_like(grad)


scale.register_autograd(lambda ctx, grad: scale_backward(grad))


@torch.library.custom_op("live_bytes_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return scale(scale(x))


@torch.library.custom_op("live_bytes_test::fill_", mutates_args=("x",))
def fill_(x: torch.Tensor) -> None:
    temporary = torch.full((NUM_TEMPORARY,), 7.0)
    x.copy_(temporary[: x.numel()])


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    lib = torch.library.Library("live_bytes_test", "FRAGMENT")
    lib.define("low_level(Tensor x, Tensor[] more, *, int num=2) -> (Tensor, Tensor)")

    def low_level(x, more, *, num=2):
        temporary = torch.empty(NUM_TEMPORARY * num)
        del temporary
        return x + 1, more[0] + 1

    lib.impl("low_level", low_level, "CPU")
    yield lib
    lib._destroy()


def test_a_temporary_inside_a_custom_op_is_counted() -> None:
    x = torch.ones(10)
    with LiveBytes() as tracker:
        y = scale(x)
        assert tracker.live_bytes == 40
    # The temporary and the cloned scalar; then the temporary is gone.
    assert tracker.peak_bytes == 4 * NUM_TEMPORARY + 4
    assert tracker.peak.label.op == "live_bytes_test.scale.default/aten.clone.default"
    del y
    assert tracker.live_bytes == 0


def test_temporaries_in_backward_of_a_custom_op_are_counted() -> None:
    x = torch.ones(10, requires_grad=True)
    with LiveBytes() as tracker:
        y = scale(x)
        with tracker.phase("backward") as backward:
            y.backward(torch.ones(10))
        # y, the incoming gradient, the temporary.
        assert backward.peak_bytes == 40 + 40 + 4 * NUM_BACKWARD_TEMPORARY
        assert x.grad is not None
        assert tracker.live_bytes == 80


def test_an_op_called_by_an_op_is_looked_into() -> None:
    with LiveBytes() as tracker:
        y = twice(torch.ones(10))
        # y and, until the op returns, the intermediate; the input is gone by now.
        assert tracker.live_bytes == 40
    # Second inner call: input, intermediate, temporary, cloned scalar.
    assert tracker.peak_bytes == 80 + 4 * NUM_TEMPORARY + 4
    assert tracker.peak.label.op.startswith("live_bytes_test.twice.default/live_bytes_test.scale")
    del y


def test_mutating_and_low_level_ops(library: torch.library.Library) -> None:
    x = torch.zeros(10)
    with LiveBytes() as tracker:
        fill_(x)
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 4 * NUM_TEMPORARY)
        assert x[0] == 7
        tracker.reset_peak()
        outputs = torch.ops.live_bytes_test.low_level(x, [x[:3]], num=3)
        assert tracker.live_bytes == 40 + 12
        assert tracker.peak_bytes == 4 * NUM_TEMPORARY * 3
        del outputs


def test_an_exception_inside_an_op_leaves_the_tracker_usable() -> None:
    @torch.library.custom_op("live_bytes_test::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with LiveBytes() as tracker:
        with pytest.raises(RuntimeError, match="no"):
            raises(torch.ones(1))
        kept = torch.ones(5)
        assert tracker.live_bytes == 20
        assert tracker.peak.label.op == "aten.ones.default"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    del kept


def test_nested_trackers_both_look_inside() -> None:
    with LiveBytes() as outer, LiveBytes() as inner:
        scale(torch.ones(10))
    assert outer.peak_bytes == inner.peak_bytes == 40 + 4 * NUM_TEMPORARY + 4


def test_modes_above_and_below_still_see_one_opaque_call() -> None:
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(10)
    below, above = Names(), Names()
    with below, LiveBytes() as tracker, above:
        scale(x)
    assert above.names == ["live_bytes_test.scale.default"]
    assert below.names[0] == "live_bytes_test.scale.default"
    assert tracker.peak_bytes == 4 * NUM_TEMPORARY + 4


def test_selective_checkpointing_does_not_recompute_a_saved_op() -> None:
    calls = []

    @torch.library.custom_op("live_bytes_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        temporary = torch.ones(NUM_TEMPORARY)
        del temporary
        return x.sin()

    counted.register_autograd(lambda ctx, grad: grad * 2)

    def policy(ctx, func, *args, **kwargs):
        saved = func is torch.ops.live_bytes_test.counted.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.ones(10, requires_grad=True)
    with LiveBytes() as tracker:
        y = checkpoint(
            lambda x: counted(x.exp()).exp(),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        # The output and the op's saved output.
        assert tracker.live_bytes == 80
        y.sum().backward()
    assert len(calls) == 1


def test_fake_tensors_count_what_real_ones_would() -> None:
    def program() -> tuple[LiveBytes, int]:
        with LiveBytes() as tracker:
            weight = torch.empty(20, 10, requires_grad=True)
            x = torch.empty(5, 10)
            y = scale((x @ weight.t()).relu())
            y.sum().backward()
        return tracker, tracker.live_bytes

    real, real_live_bytes = program()
    with FakeTensorMode():
        fake, fake_live_bytes = program()
    # weight, x, y and weight.grad.
    assert fake_live_bytes == real_live_bytes == 800 + 200 + 400 + 800
    # The peak is in scale_backward: weight, x, relu's saved result, y, the loss and its gradient
    # (one element each; the gradient of y is an expanded view).
    expected = 800 + 200 + 400 + 400 + 4 + 4 + 4 * NUM_BACKWARD_TEMPORARY
    assert real.peak_bytes == fake.peak_bytes == expected


def test_fake_tensors_on_an_absent_device_and_their_resizes() -> None:
    with FakeTensorMode(), LiveBytes(device_type="cuda") as tracker:
        x = torch.empty(100, device="cuda")
        host = torch.empty(100)
        assert tracker.live_bytes == 400
        x.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        x.untyped_storage().resize_(400)
        assert tracker.live_bytes == 400
        del x, host
    assert tracker.live_bytes == 0


def test_traceable_wrappers_count_what_they_hold() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    inner = TwoTensor(torch.ones(10), torch.ones(10))
    with LiveBytes() as tracker:
        y = inner + 1
        assert tracker.live_bytes == 80
        del y
        assert tracker.live_bytes == 0
        tracker.include(inner)
        assert tracker.live_bytes == 80
