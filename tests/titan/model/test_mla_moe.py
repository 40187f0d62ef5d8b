"""What only the family with latent attention has; that it computes what transformers computes is in
test_hf_parity."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, Steps, a_run, config_file, layout, train_all, write_data
from tests.titan.tiny import TINY, apply_model, row_positions, tiny_model
from titan_relay.config.schema import MLAConfig, MoEConfig
from titan_relay.titan.model.attention import CpuAttention, DocumentMask
from titan_relay.titan.model.balance_hook import moe_layers
from titan_relay.titan.model.families import build_model_config

SEQ_LEN = 16
MLA = MLAConfig(
    q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14
)
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    expert_dim=24,
    score_func="sigmoid",
    route_norm=True,
    route_scale=1.8,
    shared_expert_dim=20,
    num_expert_groups=4,
    num_limited_groups=2,
)
MODEL = replace(
    TINY,
    family="mla_moe",
    num_layers=3,
    num_kv_heads=0,
    head_dim=0,
    num_dense_layers=1,
    dense_dim=48,
    moe=MOE,
    mla=MLA,
)


def some_tokens() -> torch.Tensor:
    return torch.randint(64, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def test_the_bias_is_there_and_chooses_experts_though_nothing_moves_it() -> None:
    model = tiny_model(replace(MODEL, moe=replace(MOE, load_balance_coeff=0.0)))
    biases = [moe.expert_bias_E for _, moe in moe_layers([model])]
    assert all(torch.equal(bias, torch.zeros(8)) for bias in biases)
    assert sum(name.endswith("expert_bias_E") for name in model.state_dict()) == 2
    with torch.no_grad():
        for bias in biases:
            bias[:2] = 10.0  # far above any sigmoid: both experts of group 0
    apply_model(model, some_tokens(), row_positions(2, SEQ_LEN)).sum().backward()
    for _, moe in moe_layers([model]):
        assert moe.meter.read(torch.device("cpu"))[:8].tolist() == [2.0 * SEQ_LEN] * 2 + [0.0] * 6


def test_values_narrower_than_keys_in_attention_on_cpu() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 9, 3, dim, generator=generator) for dim in (10, 10, 6))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    place_BL = torch.arange(9, dtype=torch.int32).expand(2, 9)
    mask = DocumentMask(place_BL, torch.zeros_like(place_BL), place_BL)
    attention = CpuAttention(CpuAttention.Config())
    out = attention(q, k, v, attention_masks=mask, scale=0.3)
    logits = torch.einsum("blnh,bsnh->bnls", q.double(), k.double()) * 0.3
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("bnls,bsnh->blnh", weights, v.double())
    # Sums of 10 and 9 products in float32.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_parameters_and_flops_agree_with_a_count_by_hand() -> None:
    model, mla, moe = MODEL, MLA, MOE
    d, heads, qk_dim = model.dim, model.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    attention = (
        (d * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * heads * qk_dim)
        + (d * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank)
        + (mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        + heads * mla.v_head_dim * d
    )
    expert = 3 * d * moe.expert_dim
    sparse = 2 * (d * moe.num_experts + 3 * d * moe.shared_expert_dim)
    dense = 3 * (attention + 2 * d) + 3 * d * model.dense_dim + d + d * model.vocab_size
    config = build_model_config(model, seed=0, cpu=True)
    with torch.device("meta"):
        built = config.build()
    num_params, flops = config.get_nparams_and_flops(built, SEQ_LEN)
    embedding = d * model.vocab_size
    assert num_params == embedding + dense + sparse + 2 * moe.num_experts * expert
    active = dense + sparse + 2 * moe.top_k * expert
    assert flops == 6 * active + 6 * 3 * heads * (qk_dim + mla.v_head_dim) * SEQ_LEN


REFERENCE = a_run("one rank", **layout())
TWO_RANKS = [
    a_run("experts circulate", **layout(dp=2, ep=2), relay__circulate="experts"),
    a_run("tokens circulate, cp 2", **layout(cp=2, ep=2), relay__circulate="tokens"),
    a_run("all-to-all, cp 2", **layout(cp=2, ep=2), relay__dispatcher="alltoall"),
    a_run("tensor parallel", **layout(tp=2)),
    a_run("tensor parallel with experts", **layout(tp=2, ep=2)),
    a_run("pipeline", **layout(pp=2)),
    a_run("compiled", **layout(dp=2), compile__enable=True),
]


def of_the_family(runs: list[Run]) -> list[Run]:
    """The runs with MODEL's numbers over those of the shared file."""
    numbers: dict[str, Any] = {}
    for prefix, table in (("model", MODEL), ("model.moe", MOE), ("model.mla", MLA)):
        numbers |= {f"{prefix}.{k}": v for k, v in dataclasses.asdict(table).items()}
    for section in ("moe", "mla", "longrope"):
        del numbers[f"model.{section}"]
    del numbers["model.vocab_size"]
    settings = tuple((k, "none" if v is None else v) for k, v in numbers.items())
    return [Run(run.name, settings + run.settings) for run in runs]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """What the last rank saw of every run, by its name."""
    folder = tmp_path_factory.mktemp("mla")
    write_data(folder)
    config_file(folder)
    one = run_ranks(train_all, 1, str(folder), of_the_family([REFERENCE]))[0]
    two = run_ranks(train_all, 2, str(folder), of_the_family(TWO_RANKS), timeout_s=500.0)[-1]
    return one | two


@pytest.mark.slow
@pytest.mark.parametrize("name", [run.name for run in TWO_RANKS])
def test_every_layout_trains_the_same_model(name: str, steps: dict[str, Steps]) -> None:
    # As in test_parity: float32 sums in another order.
    assert steps[name].losses == pytest.approx(steps[REFERENCE.name].losses, rel=1e-5)
    assert steps[name].grad_norms == pytest.approx(steps[REFERENCE.name].grad_norms, rel=1e-4)
