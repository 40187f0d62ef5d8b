"""The feed-forward in chunks of rows: exact, saves its input only, is not run in a recompute."""

import pytest
import torch

from tests.ops import reference
from titan_relay.measure import LiveBytes
from titan_relay.ops import feed_forward
from titan_relay.recompute import relay_checkpoint


def tensors_of(num_tokens: int, *, gated: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, 8), (20, 8), (8, 20), (20, 8)] + ([(1, 8)] if gated else [])
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 201])  # a chunk has at least 64 rows
def test_values_and_gradients_are_those_of_float64(num_tokens: int, gated: bool) -> None:
    results = []
    for run, dtype in ((feed_forward, torch.float32), (reference.feed_forward, torch.float64)):
        inputs = [
            each.requires_grad_() for each in tensors_of(num_tokens, gated=gated, dtype=dtype)
        ]
        padded = inputs if gated else [*inputs, None]
        out = run(*padded)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        results.append([out.detach(), *gradients])
    for mine, wanted in zip(*results, strict=True):
        # Float32 sums over up to 201 rows and 20 products.
        torch.testing.assert_close(mine.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck_and_registration(gated: bool) -> None:
    inputs = [t.requires_grad_() for t in tensors_of(70, gated=gated, dtype=torch.float64)]
    assert torch.autograd.gradcheck(feed_forward, inputs, fast_mode=True)
    padded = inputs if gated else [*inputs, None]
    torch.library.opcheck(torch.ops.titan_relay.feed_forward, padded)


def test_saves_its_inputs_only_and_works_in_chunks() -> None:
    x, w1, w2, w3 = (
        torch.randn(shape).requires_grad_() for shape in [(4096, 16), (96, 16), (16, 96), (96, 16)]
    )
    with LiveBytes() as tracker:
        out = feed_forward(x, w1, w2, w3)
        assert tracker.live_bytes == out.untyped_storage().nbytes()
        out.sum().backward()
    # One hidden activation of all tokens is 6 copies of them; here everything is: out, its gradient
    # and dx, and a chunk's activations, of which the backward has up to seven a third each.
    assert tracker.peak_bytes < 6 * x.nbytes


@pytest.mark.parametrize("gated", [False, True])
def test_a_pre_norm_block_does_not_compute_it_again(gated: bool) -> None:
    inputs = [t.requires_grad_() for t in tensors_of(70, gated=gated, dtype=torch.float32)]
    runs = []

    def block(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        padded = weights if gated else (*weights, None)
        out = feed_forward(torch.nn.functional.rms_norm(x, (8,)), *padded)
        runs.append(bool(out.any()))
        return x + out

    expected = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    actual = torch.autograd.grad(relay_checkpoint(block, *inputs).square().sum(), inputs)
    for mine, wanted in zip(actual, expected, strict=True):
        assert torch.equal(mine, wanted)
    assert runs[:2] == [True, True]
    assert not any(runs[2:])
