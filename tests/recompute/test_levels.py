"""The retention policy: within the budget, never less for more, the best gain per byte first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_relay.recompute.levels import ChosenLevels, LayerCost, choose_levels

COSTS = st.lists(
    st.builds(
        LayerCost,
        layer=st.just(0),
        output_bytes=st.integers(0, 50),
        output_seconds=st.floats(0, 10),
        full_bytes=st.integers(0, 50),
        full_seconds=st.floats(0, 10),
    ),
    max_size=6,
).map(
    lambda costs: [
        LayerCost(i, c.output_bytes, c.output_seconds, c.full_bytes, c.full_seconds)
        for i, c in enumerate(costs)
    ]
)
RANK = {"recompute": 0, "output": 1, "full": 2}


@settings(max_examples=200, deadline=None)
@given(
    costs=COSTS,
    budgets=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    alive=st.integers(1, 4),
)
def test_budget_is_kept_and_more_of_it_never_keeps_less(costs, budgets, alive) -> None:
    small, large = (choose_levels(costs, budget, alive) for budget in sorted(budgets))
    for chosen, budget in ((small, min(budgets)), (large, max(budgets))):
        assert chosen.num_bytes <= budget
        assert chosen == ChosenLevels.of(costs, chosen.of_layer, alive)
    assert small.num_bytes <= large.num_bytes
    assert all(
        RANK[level] <= RANK[large.of_layer[layer]] for layer, level in small.of_layer.items()
    )


def equal_layers(num_layers: int, **cost: float) -> list[LayerCost]:
    return [LayerCost(layer, **cost) for layer in range(num_layers)]


def test_long_sequences_keep_all_outputs_before_any_projection() -> None:
    costs = equal_layers(3, output_bytes=10, output_seconds=10.0, full_bytes=10, full_seconds=1.0)
    assert choose_levels(costs, 40).of_layer == {0: "full", 1: "output", 2: "output"}


def test_short_sequences_keep_projections_with_their_outputs() -> None:
    costs = equal_layers(3, output_bytes=10, output_seconds=1.0, full_bytes=10, full_seconds=10.0)
    assert choose_levels(costs, 40).of_layer == {0: "full", 1: "full", 2: "recompute"}


def test_microbatches_alive_together_share_the_budget() -> None:
    costs = equal_layers(2, output_bytes=10, output_seconds=1.0, full_bytes=10, full_seconds=0.5)
    chosen = choose_levels(costs, 40, microbatches_alive=3)
    assert chosen.of_layer == {0: "output", 1: "recompute"}
    assert chosen.num_bytes == 30
