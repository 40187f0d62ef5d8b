"""Property-based: any shape and any routing, on virtual ranks with a hostile link."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.virtual_layer import virtual_errors
from tests.support.moe_cases import SKEWS, MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions

# Sums are tiny here, but a result may be small by cancellation, so that its largest value is a
# worse yardstick than in the fixed cases; float64 leaves no doubt about what is an error.
FLOAT64_TOLERANCE = 1e-12


@st.composite
def cases(draw):
    num_ranks = draw(st.integers(1, 4))
    num_experts = num_ranks * draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    case = MoeCase(
        num_ranks,
        dim=draw(st.integers(1, 9)),
        expert_dim=draw(st.integers(1, 9)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        skew=draw(st.sampled_from(SKEWS)),
        has_biases=draw(st.booleans()),
        dtype=torch.float64,
        seed=draw(st.integers(0, 1000)),
        tokens_by_rank=tuple(tokens),
    )
    circulate = draw(st.sampled_from(["experts", "tokens", "auto"]))
    options = RelayOptions(
        circulate,
        max_imbalance=draw(st.sampled_from([None, 1.0, 1.5])) if circulate == "auto" else None,
        num_slices=draw(st.sampled_from(["auto", 1, 2, 5])),
        max_rows_per_step=draw(st.sampled_from(["auto", 1, 2, 7])),
        max_tokens_per_rank=max(1, *tokens) + draw(st.integers(0, 2)),
        check_finite=draw(st.booleans()),
    )
    return case, options


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_shape_and_routing_matches_the_reference(example):
    case, options = example
    errors = virtual_errors(case, options, VirtualWorld(case.num_ranks, hostile=True))
    assert max(errors.values()) < FLOAT64_TOLERANCE, errors
