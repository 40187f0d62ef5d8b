"""What a rank says when it was left alone in a collective."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from titan_relay.titan.run import broken_message, broken_operation


def left_alone() -> str:
    """Rank 0 waits for a rank that never comes."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        return ""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        operation = broken_operation(error)
        assert operation is not None
        return broken_message(0, 7, operation, error)
    raise AssertionError("the other rank came")


def test_a_broken_collective_is_named_with_rank_and_step() -> None:
    message = run_ranks(left_alone, 2, timeout_s=60.0)[0]
    assert message.startswith("rank 0: step 7: all_reduce did not finish: ")
    assert "\n" not in message


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("bad value")])
def test_other_errors_are_not_taken_for_broken_collectives(error: Exception) -> None:
    assert broken_operation(error) is None
