"""Attention on CPU: causal, within documents, blind to padding."""

import torch

from tests.titan.tiny import apply_model, row_positions, tiny_model
from titan_relay.titan.model.attention import prepare_cpu_batch


def _same(before: torch.Tensor, after: torch.Tensor) -> None:
    # Not bit for bit: another token's routing changes how many rows an expert's GEMM has, and with
    # it the order of sums in float32. A token that is seen changes outputs by about 0.1.
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)


def test_a_document_never_sees_another() -> None:
    model = tiny_model().eval()
    tokens = torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).repeat(2)[None]
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 64
    before, after = (apply_model(model, t, positions) for t in (tokens, changed))
    assert not torch.equal(before[0, :32], after[0, :32])
    _same(before[0, 32:], after[0, 32:])


def test_a_token_never_sees_a_later_one() -> None:
    model = tiny_model().eval()
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 64
    before, after = (apply_model(model, t, row_positions(1, 16)) for t in (tokens, changed))
    _same(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_every_pad_is_a_document_of_its_own() -> None:
    positions = torch.tensor([[0, 1, 0, 1, -1, -1]])
    mask = prepare_cpu_batch(positions, positions, positions, None, None)[3]
    assert mask.allowed()[0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
