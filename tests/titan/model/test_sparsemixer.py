"""SparseMixer samples what it should, from nothing but seed, step, layer and token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.titan.runs import a_run, config_file, layout, train_all, write_data
from tests.titan.tiny import tiny_config
from titan_relay.titan.model.families.parts import gate
from titan_relay.titan.model.jitter import factors
from titan_relay.titan.model.sparsemixer import Draws, SparseMixerRouter
from titan_relay.titan.train.trainer import token_keys

LOGITS = torch.tensor([2.0, 1.9, 1.0, 1.7, 0.0, -3.0])  # 6 experts


def _router(jitter: float) -> SparseMixerRouter:
    return SparseMixerRouter.Config(
        num_experts=6,
        top_k=2,
        score_func="softmax",
        jitter=jitter,
        gate=gate(tiny_config(num_experts=6)),
    ).build()


def _keys(num_tokens: int, seed: int = 0, step: int = 1) -> torch.Tensor:
    return token_keys(torch.arange(num_tokens).view(1, -1), seed, step)


def test_picks_follow_the_softmax_of_those_that_compete() -> None:
    router = _router(jitter=0.08)
    logits = LOGITS.expand(1, 40_000, 6)
    ids = router.route_logits(logits, router.draw(_keys(40_000), layer=0)).expert_ids_BLK[0]
    # Within 2 * 0.08 * 2.0 of the best: experts 0, 1 and 3 (2.0, 1.9, 1.7).
    expected = torch.softmax(LOGITS[[0, 1, 3]], 0)
    share = torch.bincount(ids[:, 0], minlength=6)[[0, 1, 3]] / 40_000
    # Three standard errors of a share of 40,000 draws.
    assert torch.allclose(share, expected, atol=3 * 0.5 / 200)
    assert share.sum() == 1
    # With 0 gone, 1 and 3 compete for the second place, within 0.16 * 1.9 of 1.9.
    second = ids[ids[:, 0] == 0, 1]
    expected = torch.softmax(LOGITS[[1, 3]], 0)
    share = torch.bincount(second, minlength=6)[[1, 3]] / len(second)
    assert torch.allclose(share, expected, atol=3 * 0.5 / len(second) ** 0.5)
    assert share.sum() == 1


def test_a_third_of_the_weight_in_three_of_four_picks_that_are_not_the_best() -> None:
    router = _router(jitter=0.08)
    routing = router.route_logits(LOGITS.expand(1, 40_000, 6), router.draw(_keys(40_000), layer=0))
    probs = torch.softmax(LOGITS[[0, 1, 3]], 0)
    ids, scores = routing.expert_ids_BLK[0, :, 0], routing.scores_BLK[0, :, 0]
    assert torch.equal(scores[ids == 0], probs[0].expand(int((ids == 0).sum())))
    of_second = scores[ids == 1] / probs[1]
    kept = (of_second - 1).abs() < 1e-6
    assert (of_second[~kept] - 0.3333).abs().max() < 1e-6
    assert kept.float().mean() == pytest.approx(0.25, abs=3 * 0.5 / len(kept) ** 0.5)


def test_draws_depend_on_seed_step_layer_and_token_only() -> None:
    router = _router(jitter=0.01)
    draws = router.draw(_keys(64), layer=3)
    part = router.draw(_keys(64)[:, 10:20], layer=3)
    assert torch.equal(part.gumbel_BLKE, draws.gumbel_BLKE[:, 10:20])
    assert torch.equal(part.uniform_BLK, draws.uniform_BLK[:, 10:20])
    others = [
        router.draw(_keys(64), layer=4),
        router.draw(_keys(64, step=2), layer=3),
        router.draw(_keys(64, seed=1), layer=3),
    ]
    for other in others:
        assert not (other.uniform_BLK == draws.uniform_BLK).any()
    numbers = torch.cat([each.uniform_BLK.flatten() for each in [draws, *others]])
    assert numbers.unique().numel() == numbers.numel()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_logit_that_is_no_number_still_gives_two_experts(value: float, sampled: bool) -> None:
    router = _router(jitter=0.01)
    draws: Draws | None = router.draw(_keys(6), layer=0) if sampled else None
    logits = LOGITS.repeat(1, 6, 1)
    for token in range(6):
        logits[0, token, : token + 1] = value  # one such logit up to all of them
    ids = router.route_logits(logits, draws).expert_ids_BLK
    assert ((ids >= 0) & (ids < 6)).all()
    assert (ids[..., 0] != ids[..., 1]).all()


def test_noise_is_uniform_twice_and_from_keys_only() -> None:
    first, second = factors(_keys(2_000)[0], 64, layer=1, amount=0.01)
    for each in (first, second):
        assert 0.99 <= each.min() < 0.9901
        assert 1.0099 < each.max() <= 1.01
        # Mean of 128,000 uniforms of width 0.02, within three standard errors; and their spread.
        assert each.mean() == pytest.approx(1.0, abs=3 * 0.02 / 12**0.5 / 128_000**0.5)
        assert each.std() == pytest.approx(0.02 / 12**0.5, rel=0.01)
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(correlation) < 3 / 128_000**0.5
    part, _ = factors(_keys(2_000)[0, 7:9], 64, layer=1, amount=0.01)
    assert torch.equal(part, first[7:9])
    other, _ = factors(_keys(2_000)[0], 64, layer=2, amount=0.01)
    assert (other == first).float().mean() < 1e-3


PHI = {
    "model__family": "phimoe",
    "model__moe__score_func": "sparsemixer",
    "model__moe__route_norm": False,
    "model__moe__router_jitter": 0.1,
    "model__moe__input_jitter": 0.05,
    "training__steps": 3,
}
REFERENCE = "one rank"
ONE_RANK = [
    a_run(REFERENCE, **PHI, **layout()),
    a_run("accumulation", **PHI, **layout() | {"training__local_batch_size": 2}),
    a_run(
        "full recompute",
        **PHI,
        **layout(),
        relay__dispatcher="alltoall",
        activation_checkpoint__mode="full",
    ),
    a_run("compiled", **PHI, **layout(), compile__enable=True, compile__backend="eager"),
]
TWO_RANKS = [
    a_run("dp 2 ep 2", **PHI, **layout(dp=2, ep=2)),
    a_run("cp 2", **PHI, **layout(cp=2)),
    a_run("tp 2 ep 2", **PHI, **layout(tp=2, ep=2)),
    a_run("pp 2", **PHI, **layout(pp=2)),
]


def test_any_layout_samples_the_same(tmp_path: Path) -> None:
    """Another pick anywhere would move the loss in the third digit."""
    write_data(tmp_path)
    config_file(tmp_path)
    found = run_ranks(train_all, 1, str(tmp_path), ONE_RANK)[0]
    found |= run_ranks(train_all, 2, str(tmp_path), TWO_RANKS)[-1]
    for run in ONE_RANK + TWO_RANKS:
        # Float32 sums in another order, as in test_parity.
        assert found[run.name].losses == pytest.approx(found[REFERENCE].losses, rel=1e-5), run.name
