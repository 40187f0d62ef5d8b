"""The noise on a MoE layer's input: its values, its gradient, and what it takes of memory.

The noise itself (range, independence of layout) is tested with the router that goes with it, in
`test_sparsemixer`.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from titan_relay.measure import LiveBytes
from titan_relay.titan.model.jitter import factors, jitter

LAYER, AMOUNT = 3, 0.05


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _keys(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(1))


def _noise_of(keys_BL: torch.Tensor, dim: int) -> torch.Tensor:
    """Both factors of every element, by the definition: SplitMix64 on Python integers."""
    noise = torch.empty(*keys_BL.shape, dim, dtype=torch.float64)
    for place, key in enumerate(keys_BL.flatten().tolist()):
        for column in range(dim):
            bits = _split_mix(-1 - LAYER * dim - column, key)
            high, low = (1 + AMOUNT * (half / 2**31 - 1) for half in (bits >> 32, bits % 2**32))
            noise.view(-1, dim)[place, column] = high * low
    return noise


def _split_mix(counter: int, key: int) -> int:
    x = (counter * 0x9E3779B97F4A7C15 + key) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


# The last of them is more than one chunk.
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 3), (2, 0, 4), (2, 4000, 7)])
def test_value_and_gradient(shape: tuple[int, ...]) -> None:
    x_BLD, keys_BL = _tokens(*shape).requires_grad_(), _keys(*shape[:2])
    noise = _noise_of(keys_BL, shape[-1])
    y_BLD = jitter(x_BLD, keys_BL, LAYER, AMOUNT)
    # Some roundings of float32 in the factors, one each in their product and its use.
    torch.testing.assert_close(y_BLD.double(), x_BLD.double() * noise, rtol=1e-6, atol=0)
    (dx_BLD,) = torch.autograd.grad(y_BLD, x_BLD, torch.full_like(y_BLD, 2.0))
    torch.testing.assert_close(dx_BLD.double(), 2 * noise, rtol=1e-6, atol=0)


def test_the_noise_is_rounded_to_the_tokens_dtype() -> None:
    x_BLD, keys_BL = _tokens(2, 3, 5).bfloat16(), _keys(2, 3)
    first, second = factors(keys_BL.flatten(), 5, LAYER, AMOUNT)
    expected = x_BLD * (first * second).bfloat16().view_as(x_BLD)
    assert jitter(x_BLD, keys_BL, LAYER, AMOUNT).equal(expected)


def test_registration() -> None:
    args = (_tokens(2, 3, 5).requires_grad_(), _keys(2, 3), LAYER, AMOUNT)
    torch.library.opcheck(torch.ops.titan_relay.jitter, args)


def _step(x_BLD: torch.Tensor, keys_BL: torch.Tensor) -> tuple[int, int]:
    """Bytes held after forward beyond the output, and the peak of forward and backward."""
    x_BLD.requires_grad_()
    with LiveBytes() as tracker:
        out = jitter(x_BLD, keys_BL, LAYER, AMOUNT)
        held = tracker.live_bytes - out.untyped_storage().nbytes()
        out.backward(out.detach())
    return held, tracker.peak_bytes


def test_saves_keys_only_and_fake_tensors_have_the_same_peak() -> None:
    shape = (2, 1024, 64)
    held, peak = _step(torch.ones(shape, dtype=torch.bfloat16), _keys(*shape[:2]))
    assert held == 0
    with FakeTensorMode():
        x_BLD = torch.empty(shape, dtype=torch.bfloat16)
        assert _step(x_BLD, torch.empty(shape[:2], dtype=torch.int64))[0] == 0
        x_BLD = torch.empty(shape, dtype=torch.bfloat16)
        _, fake_peak = _step(x_BLD, torch.empty(shape[:2], dtype=torch.int64))
    # What is smaller than a row of all rows' temporaries: token keys, counters.
    assert abs(fake_peak - peak) <= 2**14
