"""FLOPs per token of a MoE model follow its active parameters only.

The truth is counted here from the architecture's numbers, one matrix at a time: 6 FLOPs per active
weight and token (2 forward, 4 backward), and 12 per layer, head, head dim and position for the two
attention products, causal sparsity and recomputation not counted.
"""

from dataclasses import replace

import pytest
import torch
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.param_init import skip_param_init

from titan_relay.config.schema import ModelConfig
from titan_relay.config.schema_model import MoEConfig
from titan_relay.titan.metrics.speed import known_peak_flops
from titan_relay.titan.model.families import qwen3_moe

SEQ_LEN = 32
MODEL = ModelConfig(
    family="qwen3_moe",
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=96,
    max_seq_len=SEQ_LEN,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_word_embeddings=False,
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        expert_dim=12,
        score_func="softmax",
        route_norm=True,
        load_balance_coeff=None,
    ),
)
EXPERT_FLOPS = 6 * 3 * MODEL.dim * MODEL.moe.expert_dim * MODEL.num_layers
ROUTER_FLOPS = 6 * MODEL.dim * MODEL.num_layers  # per expert


def flops_per_token(model: ModelConfig, shared_dim: int = 0) -> int:
    config = qwen3_moe.build(model, seed=0, cpu=True)
    for layer in config.layers if shared_dim else ():
        layer.moe.shared_experts = make_ffn_config(
            dim=model.dim,
            hidden_dim=shared_dim,
            w1_param_init={"weight": skip_param_init},
            w2w3_param_init={"weight": skip_param_init},
        )
    with torch.device("meta"):
        module = config.build()
    _, num_flops_per_token = config.get_nparams_and_flops(module, SEQ_LEN)
    return num_flops_per_token


def with_moe(**changes: int) -> ModelConfig:
    return replace(MODEL, moe=replace(MODEL.moe, **changes))


def counted_by_hand(model: ModelConfig) -> int:
    d, heads, head_dim = model.dim, model.num_heads, model.head_dim
    projections = d * (heads + 2 * model.num_kv_heads) * head_dim + heads * head_dim * d
    norms = 2 * d + 2 * head_dim
    router = d * model.moe.num_experts
    experts = 3 * d * model.moe.expert_dim * model.moe.top_k
    weights = model.num_layers * (projections + norms + router + experts)
    weights += d + d * model.vocab_size  # the last norm and the output; the embedding is a look-up
    return 6 * weights + 12 * model.num_layers * heads * head_dim * SEQ_LEN


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 2), (8, 4), (8, 8), (1, 1)])
def test_flops_agree_with_a_count_by_hand(num_experts: int, top_k: int) -> None:
    model = with_moe(num_experts=num_experts, top_k=top_k)
    assert flops_per_token(model) == counted_by_hand(model)


def test_tied_embeddings_still_pay_for_the_output_product() -> None:
    assert flops_per_token(replace(MODEL, tie_word_embeddings=True)) == flops_per_token(MODEL)


def test_more_experts_at_the_same_top_k_change_only_the_router() -> None:
    difference = flops_per_token(with_moe(num_experts=64)) - flops_per_token(MODEL)
    assert difference == (64 - 8) * ROUTER_FLOPS


def test_twice_the_top_k_doubles_the_routed_part_only() -> None:
    difference = flops_per_token(with_moe(top_k=4)) - flops_per_token(MODEL)
    assert difference == 2 * EXPERT_FLOPS, "two experts more on top of two"


@pytest.mark.parametrize("top_k", [2, 4])
def test_a_shared_expert_adds_once_whatever_the_top_k(top_k: int) -> None:
    model = with_moe(top_k=top_k)
    difference = flops_per_token(model, shared_dim=20) - flops_per_token(model)
    assert difference == 6 * 3 * model.dim * 20 * model.num_layers


def test_no_peak_on_cpu_or_for_an_unknown_device() -> None:
    def torchtitans(device_name: str) -> float:
        # What torchtitan answers, whose own look-up is out of use on a machine without a device.
        return 989e12 if "H100" in device_name else 312e12

    assert known_peak_flops("CPU", True, torchtitans) is None
    assert known_peak_flops("Some Future Accelerator 9000", False, torchtitans) is None
    assert known_peak_flops("NVIDIA A100-SXM4-80GB", False, torchtitans) == 312e12
    assert known_peak_flops("NVIDIA H100 80GB HBM3", False, torchtitans) == 989e12
