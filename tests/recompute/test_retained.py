"""Retained calls, rebuilt inputs and kept decisions in small functions: equal bits, fewer calls."""

import functools

import pytest
import torch

from titan_relay.recompute import relay_checkpoint
from titan_relay.recompute.decisions import keep_decision
from titan_relay.recompute.frame import Keeps, current_frame
from titan_relay.recompute.retained import rebuilt, retained_call

WEIGHTS = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


class Block:
    """Two calls of kind "outer" around one of kind "inner"; counts the runs of each."""

    def __init__(self) -> None:
        self.weights = WEIGHTS.clone().requires_grad_()
        self.runs = {"outer": 0, "inner": 0}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for weight, kind in zip(self.weights, ("outer", "inner", "outer"), strict=True):

            def costly(h: torch.Tensor, weight=weight, kind=kind) -> torch.Tensor:
                self.runs[kind] += 1
                return (h @ weight).tanh() * 2

            x = x + retained_call(kind, costly, rebuilt(torch.sin, x)).relu()
        return x

    def gradients(self, *, num_backwards: int = 1, **kwargs) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        out = relay_checkpoint(self, x, early_stop=False, **kwargs) if kwargs else self(x)
        for left in reversed(range(num_backwards)):
            out.square().sum().backward(retain_graph=left > 0)
        return [x.grad, self.weights.grad]


KINDS = [frozenset(), {"inner"}, {"outer"}, {"outer", "inner"}]


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(sorted(kinds)) or "none")
def test_kept_calls_run_once_and_gradients_have_equal_bits(kinds, num_backwards) -> None:
    expected = Block().gradients(num_backwards=num_backwards)
    block = Block()
    actual = block.gradients(
        num_backwards=num_backwards, keeps=functools.partial(Keeps, frozenset(kinds))
    )
    assert all(map(torch.equal, actual, expected))
    if num_backwards == 1:
        assert block.runs == {
            "outer": 2 if "outer" in kinds else 4,
            "inner": 1 if "inner" in kinds else 2,
        }


def test_a_decision_is_made_once() -> None:
    decided = []

    def block(x: torch.Tensor) -> torch.Tensor:
        # Another choice in the recompute, as close values may make.
        choices = [torch.full((1,), index + len(decided)) for index in range(2)]
        kept = [keep_decision(choice, num_options=8) for choice in choices]
        decided.append([int(choice) for choice in kept])
        return x[kept[0]].sin() * x[kept[1]].cos()

    x = torch.arange(1.0, 9.0, requires_grad=True)
    relay_checkpoint(block, x).sum().backward()
    assert decided == [[0, 1], [0, 1]]
    assert x.grad.nonzero().flatten().tolist() == [0, 1]


def test_a_block_is_left_as_it_was_entered() -> None:
    """Nested, after its forward, after its recompute and after an error in it."""
    found = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        found.append(current_frame())
        return x.sin()

    def outer(x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        frame = current_frame()
        out = relay_checkpoint(inner, x)
        assert current_frame() is frame is not found[-1] is not None
        assert not fails, "on purpose"
        return out.exp()

    x = X.clone().requires_grad_()
    out = relay_checkpoint(outer, x)
    assert current_frame() is None
    out.sum().backward()
    assert current_frame() is None
    assert len(found) > 1
    with pytest.raises(AssertionError, match="on purpose"):
        relay_checkpoint(outer, x, fails=True)
    assert current_frame() is None
