"""Runs in which something is uneven or goes wrong end alike on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.metrics import BaseLogger

from tests.support.distributed import run_ranks
from tests.titan.runs import SEQ_LEN, a_run, config_file, layout, trainer_of, write_data
from titan_relay.moe import relay_ring
from titan_relay.titan.model.balance_hook import moe_layers
from titan_relay.titan.train.relay_setup import expected_relay

EP4 = layout(dp=2, cp=2, ep=4)
NAN_STEP, NAN_RANK, NAN_LAYER = 2, 1, 1


def nan_on_one_rank(folder: Path) -> str:
    """One NaN logit of one token on one rank; the message this rank stopped with."""
    import torch.distributed as dist

    from titan_relay.titan.model.finite import NonFiniteStepError

    trainer = trainer_of(folder, a_run("nan", **EP4))
    moe = dict(moe_layers(trainer.model_parts))[NAN_LAYER]

    def poison(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        if trainer.step == NAN_STEP and dist.get_rank() == NAN_RANK:
            logits = logits.clone()
            logits[0, 3, 2] = float("nan")
        return logits

    moe.router.gate.register_forward_hook(poison)
    before = None
    try:
        trainer.train()
    except NonFiniteStepError as error:
        before = str(error)
    finally:
        trainer.close()
    return f"{before} (after {len(trainer.losses)} steps)"


def all_tokens_to_two_experts(folder: Path) -> dict[str, Any]:
    """Every token goes to experts 0 and 1, which ring rank 0 owns; gradients of the others."""
    from titan_relay.titan.model.balance_hook import moe_layers

    settings = EP4 | {"model__moe__load_balance_coeff": 1e-9, "training__steps": 2}
    trainer = trainer_of(folder, a_run("one rank hot", **settings))
    for _, moe in moe_layers(trainer.model_parts):
        moe.expert_bias_E[:2] += 100.0
    missing, largest = [], 0.0

    def look(*_: Any) -> None:
        nonlocal largest
        for name, param in trainer.model_parts[0].named_parameters():
            if param.grad is None:
                missing.append(name)
            elif "inner_experts" in name and torch.distributed.get_rank() != 0:
                largest = max(largest, float(param.grad.to_local().abs().max()))

    trainer.optimizers.register_step_pre_hook(look)
    trainer.train()
    shares = trainer.balance.stats.tokens_LE
    trainer.close()
    return {"missing": missing, "largest": largest, "tokens": shares.tolist()}


def finite_data(folder: Path) -> dict[str, Any]:
    """A corpus that ends after a few steps, on different ranks at different rows."""
    settings = EP4 | {"data__infinite": False, "training__steps": 40}
    settings |= {"data__files": f"{folder}/short.jsonl"}
    trainer = trainer_of(folder, a_run("finite", **settings))
    trainer.train()
    trainer.close()
    return {"losses": trainer.losses, "steps": trainer.step}


def outputs_of_two_documents(folder: Path, first_token: int) -> Any:
    """Logits of a row of two documents under context parallelism, in this rank's order."""
    trainer = trainer_of(folder, a_run("cp", **layout(cp=4)))
    tokens = (torch.arange(SEQ_LEN) % 50)[None]
    tokens[0, 0] = first_token
    positions = torch.arange(SEQ_LEN // 2).repeat(2)[None]
    labels = torch.arange(SEQ_LEN)[None]  # where each token of this rank stood in the row
    inputs, places, extra = trainer.post_dataloading_process(
        {"input": tokens, "positions": positions}, labels
    )
    with torch.no_grad():
        logits = trainer.model_parts[0].eval()(inputs, **extra)
    trainer.close()
    return torch.cat([places.unsqueeze(-1).float(), logits], dim=-1)[0].numpy()


class KeepingLogger(BaseLogger):
    """Keeps the curves of the last report."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.curves = metrics


def traffic(folder: Path, circulate: str) -> dict[str, float]:
    """Bytes that a rank sent in one step, as the curves say, and what the plan says."""
    settings = layout(dp=4, ep=4) | {"relay__circulate": circulate, "training__steps": 1}
    trainer = trainer_of(folder, a_run(f"ring of {circulate}", **settings))
    trainer.metrics_processor.logger = logger = KeepingLogger()
    trainer.train()
    experts = next(moe_layers(trainer.model_parts))[1].routed_experts
    timeout: Any = relay_ring(experts.group).link.timeout  # type: ignore[attr-defined]
    trainer.close()
    plan = expected_relay(trainer.config.run, 4)
    assert plan is not None
    traffics = [traffic for traffic, _ in plan.directions.values()]
    assert [traffic.circulate for traffic in traffics] == [circulate] * 2
    planned = sum(getattr(each, f"{circulate}_bytes") for each in traffics)
    return {
        "sent": logger.curves["relay/bytes_sent"],
        "planned": planned * trainer.config.run.model.num_layers,
        "timeout_s": timeout.total_seconds(),
    }


def scenario(folder: str) -> dict[str, Any]:
    """All of this file inside one group of ranks."""
    torch.set_num_threads(1)
    path = Path(folder)
    return {
        "nan": nan_on_one_rank(path),
        "hot": all_tokens_to_two_experts(path),
        "finite": finite_data(path),
        "traffic": {each: traffic(path, each) for each in ("experts", "tokens")},
        "documents": [outputs_of_two_documents(path, token) for token in (1, 2)],
    }


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    write_data(folder)
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "short.jsonl").write_text("".join(lines[:19]))
    config_file(folder)
    return run_ranks(scenario, 4, str(folder), timeout_s=400.0)


def test_a_nan_logit_on_one_rank_stops_all_naming_layer_and_step(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert f"step {NAN_STEP}: " in rank["nan"]
        assert f"layer {NAN_LAYER} (1 tokens)" in rank["nan"]
        assert f"(after {NAN_STEP - 1} steps)" in rank["nan"]


def test_ranks_without_tokens_take_part_with_zero_gradients(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["hot"]["missing"] == []
        assert rank["hot"]["largest"] == 0.0
        for tokens in rank["hot"]["tokens"]:
            assert tokens[0] == tokens[1] == 8 * SEQ_LEN
            assert sum(tokens[2:]) == 0


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_the_ring_sends_the_bytes_that_were_planned(
    circulate: str, by_rank: list[dict[str, Any]]
) -> None:
    for rank in by_rank:
        assert rank["traffic"][circulate]["sent"] == rank["traffic"][circulate]["planned"] > 0


def test_after_the_first_step_the_ring_waits_no_longer_than_the_training_timeout(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert rank["traffic"]["experts"]["timeout_s"] == 100.0  # comm.train_timeout_seconds


def test_finite_data_ends_alike_on_all_ranks(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["finite"] == by_rank[0]["finite"]
        assert 2 <= len(rank["finite"]["losses"]) < 40


def test_documents_do_not_see_each_other_under_context_parallelism(
    by_rank: list[dict[str, Any]],
) -> None:
    before, after = (
        torch.cat([torch.from_numpy(rank["documents"][i]) for rank in by_rank]) for i in (0, 1)
    )
    assert before[:, 0].sort().values.tolist() == list(range(SEQ_LEN))
    changed = (before[:, 1:] - after[:, 1:]).abs().amax(dim=1)
    second = before[:, 0] >= SEQ_LEN // 2
    assert changed[~second].max() > 1e-3
    # Only experts' GEMMs, whose number of rows changes, may sum in another order.
    assert changed[second].max() < 1e-5
