"""Both rings on 1 to 4 ranks: every result against the dense reference."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import check_case, run_relay
from tests.support.distributed import run_ranks, subgroup
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, RelayUsageError, SwiGLU

WORLD_SIZE = 4
RINGS = ("experts", "tokens")


def groups_of_every_size():
    """Groups of 1, 2, 3 and 4 ranks; made by all ranks, used by their members."""
    return {size: subgroup(range(size)) for size in range(1, WORLD_SIZE + 1)}


def _check_parity(circulate):
    for num_ranks, group in groups_of_every_size().items():
        if group is None:
            continue
        base = MoeCase(num_ranks=num_ranks, num_experts=12)
        for skew in SKEWS:
            check_case(replace(base, skew=skew), group, RelayOptions(circulate=circulate))
        for slices in (1, 2, 3, 100):
            options = RelayOptions(circulate=circulate, num_slices=slices, max_rows_per_step=3)
            check_case(base, group, options)
        options = RelayOptions(circulate=circulate, num_slices=2)
        for case in (
            replace(base, num_tokens=0),
            replace(base, num_tokens=1),
            replace(base, top_k=1, num_experts=num_ranks),  # one expert per rank
            replace(base, top_k=12),  # K = E
            replace(base, num_tokens=31, dim=7, expert_dim=5),
            replace(base, has_biases=True, skew="zipf"),
            # Edge of tiles, more choices than a rank has experts, and wider than deep.
            replace(
                base, num_tokens=64, dim=64, expert_dim=96, num_experts=8 + 4 * (num_ranks == 3)
            ),
        ):
            check_case(case, group, options)
        clamped = SwiGLU(alpha=1.702, limit=0.6, up_offset=1.0)
        check_case(replace(base, has_biases=True), group, options, clamped)
    dist.barrier()


@pytest.mark.parametrize("circulate", RINGS)
def test_every_result_matches_the_reference_on_one_to_four_ranks(circulate):
    run_ranks(_check_parity, WORLD_SIZE, circulate)


def _check_unequal_tokens():
    for num_ranks, group in groups_of_every_size().items():
        if group is None:
            continue
        for tokens in ((5, 3, 3, 4), (0, 7, 2, 0), (1, 0, 0, 0)):
            case = MoeCase(num_ranks=num_ranks, num_experts=12, tokens_by_rank=tokens)
            for circulate in (*RINGS, "auto"):
                for slices in ("auto", 1, 3):
                    options = RelayOptions(
                        circulate=circulate, num_slices=slices, max_tokens_per_rank=9
                    )
                    check_case(case, group, options)
    dist.barrier()


def test_ranks_with_different_numbers_of_tokens():
    run_ranks(_check_unequal_tokens, WORLD_SIZE)


def _check_refused():
    for num_ranks, group in groups_of_every_size().items():
        if group is None or num_ranks == 1:
            continue
        case = MoeCase(num_ranks=num_ranks, num_experts=12, tokens_by_rank=(5, 3, 3, 4))
        for circulate in (*RINGS, "auto"):
            with pytest.raises(RelayUsageError, match=r"number of tokens T must be equal.*\[5, 3"):
                run_relay(case, group, RelayOptions(circulate=circulate))
            with pytest.raises(RelayUsageError, match="max_tokens_per_rank = 4 is less"):
                run_relay(case, group, RelayOptions(circulate=circulate, max_tokens_per_rank=4))
        rank = dist.get_rank(group)
        different = RelayOptions(circulate="tokens" if rank else "experts")
        with pytest.raises(RelayUsageError, match=r"RelayOptions\.\w+ must be equal on all ranks"):
            run_relay(MoeCase(num_ranks, num_experts=12), group, different)
        # After every refusal the ring works on.
        check_case(MoeCase(num_ranks, num_experts=12), group, RelayOptions())
    dist.barrier()


def test_disagreement_is_the_same_error_on_every_rank():
    run_ranks(_check_refused, WORLD_SIZE)


def _check_bits():
    group = subgroup([0, 1, 2])
    if group is not None:
        for circulate in RINGS:
            for dtype in (torch.float32, torch.bfloat16):
                case = MoeCase(3, num_tokens=40, num_experts=12, top_k=4, dtype=dtype)
                options = RelayOptions(circulate=circulate, num_slices=2)
                first = run_relay(case, group, options)
                second = run_relay(case, group, options)
                for name, value in first.items():
                    assert torch.equal(value, second[name]), (circulate, dtype, name)
    dist.barrier()


def test_two_runs_give_identical_bits():
    run_ranks(_check_bits, WORLD_SIZE)
