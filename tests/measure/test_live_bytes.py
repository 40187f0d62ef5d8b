"""LiveBytes on plain tensors, every figure computed by hand. float32: n elements, 4n bytes."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_relay.measure import LiveBytes


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_tensor_counts_from_creation_to_death() -> None:
    with LiveBytes() as tracker:
        x = torch.empty(100)
        assert tracker.live_bytes == 400
        y = x + 1
        assert tracker.live_bytes == 800
        del x
        assert tracker.live_bytes == 400
    del y
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 800


def test_aliases_share_one_storage() -> None:
    with LiveBytes() as tracker:
        x = torch.zeros(10, 10)
        kept = [x.view(100), x[3], x.t(), x.detach(), x.expand(4, 10, 10), x.data, x.unbind(0)]
        x.add_(1)
        x[0] = 5
        assert tracker.live_bytes == 400
        part = x[0]
        kept.clear()
        del x
        assert tracker.live_bytes == 400, "a view keeps the whole storage alive"
        del part
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 400


def test_a_freed_temporary_raises_only_the_peak() -> None:
    with LiveBytes() as tracker:
        x = torch.zeros(100)
        y = (x * 2).sum()
    assert tracker.live_bytes == 400 + 4
    assert tracker.peak_bytes == 400 + 400 + 4
    assert tracker.peak.label.op == "aten.sum.default"
    assert tracker.peak.by_op() == {
        "aten.zeros.default": 400,
        "aten.mul.Tensor": 400,
        "aten.sum.default": 4,
    }
    del x, y


def test_dtype_and_strides_decide_the_size() -> None:
    with LiveBytes() as tracker:
        kept = [torch.zeros(10, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)]
        kept.append(torch.empty_strided((2, 2), (10, 1)))
        assert tracker.live_bytes == 20 + 24 + 12 * 4


def test_out_variants_count_what_they_allocate() -> None:
    x = torch.ones(100)
    empty, full = torch.empty(0), torch.empty(100)
    with LiveBytes() as tracker:
        torch.add(x, 1, out=full)
        assert tracker.live_bytes == 0, "writes into memory that was there before"
        torch.add(x, 1, out=empty)
        assert tracker.live_bytes == 400, "an older but empty storage got its memory here"
        inside = torch.empty(0)
        torch.add(x, 1, out=inside)
        assert tracker.live_bytes == 800
        inside.resize_(300)
        assert tracker.live_bytes == 400 + 1200


def test_existing_tensors_count_only_when_included() -> None:
    x, grown = torch.ones(100), torch.ones(10)
    with LiveBytes() as tracker:
        kept = [x.view(10, 10), x.mul_(2), x.detach()]
        assert tracker.live_bytes == 0
        tracker.include([x, kept[0]], name="state")
        assert tracker.live_bytes == 400
        assert tracker.peak.by_phase() == {"state": 400}
        tracker.exclude(x)
        assert tracker.live_bytes == 0
        tracker.exclude(grown)
        grown.untyped_storage().resize_(4000)
        assert tracker.live_bytes == 0


def test_include_takes_modules_with_gradients_and_optimizers() -> None:
    module = nn.Linear(10, 5)
    module.register_buffer("steps", torch.zeros(3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    with LiveBytes() as tracker:
        tracker.include(module)
        assert tracker.live_bytes == 2 * (50 + 5) * 4 + 12
        tracker.include(optimizer)
        # exp_avg and exp_avg_sq per parameter, and a scalar step each.
        assert tracker.live_bytes == 4 * (50 + 5) * 4 + 12 + 2 * 4


def test_storages_resized_in_place_are_followed() -> None:
    x = torch.ones(100)
    with LiveBytes() as tracker:
        y = torch.ones(100)
        y.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        with tracker.phase("refill"):
            y.untyped_storage().resize_(400)
        assert tracker.live_bytes == 400
        assert tracker.peak.by_phase() == {"(none)": 400}
        x.untyped_storage().resize_(0)
        assert tracker.live_bytes == 400, "x was never counted"
        x.untyped_storage().resize_(400)
        assert tracker.live_bytes == 800, "but its new memory is"
    resized_outside = torch.ones(5)
    resized_outside.untyped_storage().resize_(4000)
    assert tracker.live_bytes == 800
    assert "resize_and_tell" not in repr(torch.UntypedStorage.resize_)


def test_saved_for_backward_stays_live_until_backward() -> None:
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as tracker:
        y = x.exp()  # saves its result
        z = y.sin()  # saves y
        loss = z.sum()
        del y, z
        # z is not needed by anyone; y is; loss is one element.
        assert tracker.live_bytes == 400 + 4
        loss.backward()
        # y is freed; x.grad stays.
        assert tracker.live_bytes == 4 + 400
        assert x.grad is not None


def test_autograd_functions_are_seen_in_both_directions() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            temporary = torch.empty(1000)
            del temporary
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            temporary = torch.empty(3000)
            del temporary
            return 2 * x * grad

    x = torch.ones(10, requires_grad=True)
    with LiveBytes() as tracker:
        with tracker.phase("forward") as forward:
            y = Square.apply(x)
        with tracker.phase("backward") as backward:
            y.backward(torch.ones(10))
    assert forward.peak_bytes == 4000
    # y, the incoming gradient and the temporary.
    assert backward.peak_bytes == 40 + 40 + 12000


def test_a_checkpointed_block_keeps_its_input_and_pays_again_in_backward() -> None:
    def block(x):
        return x.exp().sin().cos()

    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as tracker:
        with tracker.phase("forward"):
            y = checkpoint(block, x, use_reentrant=False)
            # exp and sin are gone, cos is the output.
            assert tracker.live_bytes == 400
        with tracker.phase("backward") as backward:
            y.backward(torch.ones(100))
        assert x.grad is not None
        assert tracker.live_bytes == 400 + 400
        # y, the incoming gradient, the recomputed exp and sin (recomputation stops before cos,
        # whose value no gradient needs), and cos's formula g * -sin(s): its sine, the negation,
        # the product.
        assert backward.peak_bytes == 400 * 7
        plain = x.detach().requires_grad_()
        kept = block(plain)
        assert tracker.live_bytes == 800 + 3 * 400, "without checkpoint all three are kept"
        del kept


def test_phases_nest_and_name_allocations() -> None:
    with LiveBytes() as tracker:
        with tracker.phase("outer") as outer:
            a = torch.empty(10)
            with tracker.phase("inner") as inner:
                b = torch.empty(20)
            c = torch.empty(5)
        assert outer.peak.by_phase() == {"inner": 80, "outer": 60}
        assert inner.peak_bytes == 120
        del a, b, c
        with tracker.phase("outer") as again:
            pass
        assert again.peak_bytes == 0


def test_reset_inside_a_phase_keeps_the_peaks_around_it() -> None:
    with LiveBytes() as tracker:
        with tracker.phase("step") as step:
            x = torch.empty(1000)
            del x
            with tracker.phase("part") as part:
                y = torch.empty(500)
                del y
                tracker.reset_peak()
                assert part.peak_bytes == 0
            assert step.peak_bytes == 4000
        assert tracker.peak_bytes == 4000
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_trackers_nest_with_separate_counts() -> None:
    with LiveBytes() as outer:
        a = torch.empty(10)
        with LiveBytes() as inner:
            b = torch.empty(20)
            c = a + 1
            inner.reset_peak()
        d = torch.empty(5)
        assert (outer.live_bytes, inner.live_bytes) == (40 + 80 + 40 + 20, 80 + 40)
        del a, b, c, d
        assert outer.live_bytes == inner.live_bytes == 0


def test_a_tracker_can_be_entered_again() -> None:
    tracker = LiveBytes()
    with tracker:
        a = torch.empty(10)
    b = torch.empty(10)
    with tracker:
        c = torch.empty(1)
        assert tracker.live_bytes == 44
    del a, b, c
    assert tracker.live_bytes == 0


def test_peak_without_named_tensors_is_exact() -> None:
    weight = torch.ones(50, 50, requires_grad=True)
    with LiveBytes(keep_events=True) as tracker:
        y = weight * 2
        y.backward(torch.ones(50, 50))
        del y
    # y, the incoming gradient and the outgoing one, which becomes weight.grad.
    assert tracker.peak_bytes == 30_000
    assert tracker.peak_bytes_without(weight.grad) == 20_000
    # Naming the parameter names its gradient as well; the parameter itself was never counted.
    assert tracker.peak_bytes_without(weight) == 20_000
    assert sum(event.delta_bytes for event in tracker.events) == tracker.live_bytes
    with LiveBytes() as other, pytest.raises(ValueError, match="keep_events=True"):
        other.peak_bytes_without(weight)


def test_meta_tensors_have_no_memory_and_devices_can_be_chosen() -> None:
    with LiveBytes() as tracker, LiveBytes(device_type="cuda") as cuda_only:
        kept = [torch.empty(100, device="meta"), torch.empty(1)]
        kept[0].untyped_storage().resize_(800)
    assert (tracker.live_bytes, cuda_only.live_bytes) == (4, 0)


def test_deaths_on_other_threads_are_counted() -> None:
    with LiveBytes() as tracker:
        box = [torch.empty(100) for _ in range(50)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        gc.collect()
        assert tracker.live_bytes == 0


def test_results_are_the_same_with_the_tracker_on() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)

    def gradients():
        module.zero_grad()
        module(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    plain = gradients()
    with LiveBytes():
        tracked = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, tracked, strict=True))
