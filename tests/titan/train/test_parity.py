"""Every way of spreading a run over ranks trains the same model as one rank does."""

import pytest

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, Steps, a_run, config_file, layout, train_all, write_data

# One fixture trains some forty runs; a slow or shared machine may take its time.
pytestmark = pytest.mark.timeout(1000)

REFERENCE = "one rank"
ALLTOALL = {"relay__dispatcher": "alltoall"}
# Loads of all tokens of a microbatch together: large enough to show beside the model's own loss.
BATCH = "batch scope"
BATCH_SCOPE = {"model__moe__aux_loss_scope": "batch", "model__moe__aux_loss_coeff": 1.0}

ONE_RANK = [
    a_run(REFERENCE, **layout()),
    a_run("gradient accumulation", **layout() | {"training__local_batch_size": 2}),
    a_run("compiled", **layout(), compile__enable=True, attention_retention__mode="full"),
    a_run("all-to-all on one rank", **layout(), relay__dispatcher="alltoall"),
    a_run(BATCH, **layout(), **BATCH_SCOPE),
]
FOUR_RANKS = [
    a_run("all-to-all, dp 2 cp 2 ep 4", **layout(dp=2, cp=2, ep=4), relay__dispatcher="alltoall"),
    a_run("experts, dp 2 cp 2 ep 4", **layout(dp=2, cp=2, ep=4), relay__circulate="experts"),
    a_run("relay, dp 4 ep 2 (efsdp 2)", **layout(dp=4, ep=2)),
    a_run(
        "accumulation",
        **layout(dp=4, ep=4) | {"training__local_batch_size": 1},
        attention_retention__block_inputs="host",
        attention_retention__host_budget_gib=0.01,
        attention_retention__mode="output",
    ),
    a_run("relay, cp 4 ep 4", **layout(cp=4, ep=4), attention_retention__mode="full"),
    a_run(
        "tokens, dp 2 cp 2 ep 4",
        **layout(dp=2, cp=2, ep=4),
        relay__circulate="tokens",
        attention_retention__mode="output",
    ),
    a_run("tokens, HSDP, rep 2 dp 2 ep 2", **layout(rep=2, dp=2, ep=2), relay__circulate="tokens"),
    a_run(
        "room for more tokens, a limit to imbalance",
        **layout(dp=4, ep=4),
        relay__max_tokens_per_rank=200,
        relay__max_imbalance=1.1,
    ),
    a_run("no ep, dp 4", **layout(dp=4), attention_retention__mode="auto"),
    a_run("HSDP, rep 2 dp 2 ep 2", **layout(rep=2, dp=2, ep=2), relay__circulate="experts"),
    a_run(
        "tensor parallel, dp 2 tp 2 ep 2",
        **layout(dp=2, tp=2, ep=2),
        attention_retention__mode="full",
    ),
    a_run(
        "tensor parallel, dp 2 tp 2 ep 4",
        **layout(dp=2, tp=2, ep=4),
        attention_retention__block_inputs="host",
        attention_retention__host_budget_gib=0.01,
        attention_retention__mode="output",
    ),
    a_run(
        "pipeline, dp 2 pp 2 ep 2",
        **layout(dp=2, pp=2, ep=2),
        relay__circulate="experts",
        attention_retention__block_inputs="host",
        attention_retention__host_budget_gib=0.01,
        attention_retention__mode="full",
    ),
    a_run(
        "full recompute", **layout(dp=2, cp=2, ep=4), **ALLTOALL, activation_checkpoint__mode="full"
    ),
    a_run(
        "selective", **layout(dp=2, cp=2, ep=4), **ALLTOALL, activation_checkpoint__mode="selective"
    ),
    a_run("chunked loss", **layout(dp=2, cp=2, ep=4), loss__name="chunked_cross_entropy"),
    a_run(f"{BATCH}, dp 2 cp 2 ep 4", **layout(dp=2, cp=2, ep=4), **BATCH_SCOPE),
    a_run(f"{BATCH}, dp 2 tp 2 ep 4", **layout(dp=2, tp=2, ep=4), **BATCH_SCOPE),
]


def reference_of(name: str) -> str:
    """The run on one rank that this one is compared with."""
    return BATCH if name.startswith(BATCH) else REFERENCE


def _validated(runs: list[Run]) -> list[Run]:
    every = (("validator.enable", True), ("validator.freq", 3))
    return [Run(run.name, run.settings + every) for run in runs]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Steps]]:
    """Steps of all runs as each of the four ranks saw them; the reference is in all of them."""
    folder = tmp_path_factory.mktemp("parity")
    write_data(folder)
    config_file(folder)
    one = run_ranks(train_all, 1, str(folder), _validated(ONE_RANK), timeout_s=900.0)[0]
    four = run_ranks(train_all, 4, str(folder), _validated(FOUR_RANKS), timeout_s=900.0)
    return [one | each for each in four]


@pytest.mark.parametrize("name", [run.name for run in ONE_RANK[1:] + FOUR_RANKS])
def test_losses_equal_those_of_one_rank(name: str, by_rank: list[dict[str, Steps]]) -> None:
    steps = by_rank[-1]  # the last rank is on the last pipeline stage, which has the loss
    assert len(steps[name].losses) == 6
    # Float32 sums in another order: seen up to 1e-6 after six steps.
    assert steps[name].losses == pytest.approx(steps[reference_of(name)].losses, rel=1e-5)


@pytest.mark.parametrize("name", [run.name for run in ONE_RANK[1:] + FOUR_RANKS])
def test_gradient_norms_equal_those_of_one_rank_on_every_rank(
    name: str, by_rank: list[dict[str, Steps]]
) -> None:
    """Adam hides a gradient that is too large by a factor; the norm shows it."""
    for steps in by_rank:
        assert steps[name].grad_norms == by_rank[0][name].grad_norms
        # As above; norms are more sensitive than losses.
        assert steps[name].grad_norms == pytest.approx(
            steps[reference_of(name)].grad_norms, rel=1e-4
        )


@pytest.mark.parametrize("name", [run.name for run in ONE_RANK[1:] + FOUR_RANKS])
def test_validation_losses_equal_those_of_one_rank(
    name: str, by_rank: list[dict[str, Steps]]
) -> None:
    """Over all held-out documents, which end at different rows on different ranks."""
    steps = by_rank[-1]
    assert len(steps[REFERENCE].validation_losses) == 3  # after steps 1, 3 and 6
    # As for training losses.
    assert steps[name].validation_losses == pytest.approx(
        steps[reference_of(name)].validation_losses, rel=1e-5
    )


def test_the_runs_learn(by_rank: list[dict[str, Steps]]) -> None:
    losses = by_rank[0][REFERENCE].losses
    assert losses[-1] < losses[0] - 0.1
