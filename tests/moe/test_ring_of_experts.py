"""Ring of experts on 1 to 4 ranks: every result against the dense reference."""

from dataclasses import replace

import torch.distributed as dist

from tests.moe.parity import check_case
from tests.support.distributed import run_ranks, subgroup
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, SwiGLU

WORLD_SIZE = 4


def groups_of_every_size():
    """Groups of 1, 2, 3 and 4 ranks; made by all ranks, used by their members."""
    return {size: subgroup(range(size)) for size in range(1, WORLD_SIZE + 1)}


def _check_parity():
    for num_ranks, group in groups_of_every_size().items():
        if group is None:
            continue
        base = MoeCase(num_ranks=num_ranks, num_experts=12)
        for skew in SKEWS:
            check_case(replace(base, skew=skew), group, RelayOptions())
        for slices in (1, 2, 3):
            options = RelayOptions(num_slices=slices, max_rows_per_step=3)
            check_case(base, group, options)
        for case in (
            replace(base, num_tokens=0),
            replace(base, top_k=1, num_experts=num_ranks),  # one expert per rank
            replace(base, top_k=12),  # K = E
            replace(base, num_tokens=31, dim=7, expert_dim=5),
            replace(base, has_biases=True, skew="zipf"),
        ):
            check_case(case, group, RelayOptions(num_slices=2))
        clamped = SwiGLU(alpha=1.702, limit=0.6, up_offset=1.0)
        check_case(replace(base, has_biases=True), group, RelayOptions(num_slices=4), clamped)
    dist.barrier()


def test_every_result_matches_the_reference_on_one_to_four_ranks():
    run_ranks(_check_parity, WORLD_SIZE)
