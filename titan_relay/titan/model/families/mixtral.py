"""Mixtral (arXiv:2401.04088): GQA without biases or QK-norm, the best experts' scores renormalised.

A softmax over the logits of the top k, as the paper writes it, is the softmax over all experts
divided by the sum of the top k's: `score_func = "softmax"` with `route_norm = true`.
"""

from __future__ import annotations

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import adapter, architecture, parts
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family


class Adapter(adapter.Adapter):
    """Experts under `block_sparse_moe`, their matrices numbered."""

    spelling = adapter.BLOCK_SPARSE


def build(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return parts.decoder(
        model,
        seed=seed,
        layer=lambda _: parts.block(model, parts.gqa(model, cpu=cpu), moe=parts.moe(model)),
    )


FAMILY = Family(
    build=build,
    adapter=Adapter,
    architectures=(
        architecture.Architecture(
            model_type="mixtral",
            class_name="MixtralForCausalLM",
            keys=(*architecture.GQA, *architecture.LOCAL_EXPERTS),
            fixed=architecture.SOFTMAX | {"moe.route_norm": True},
            only=architecture.PLAIN,
        ),
    ),
    needs=("model.num_kv_heads", "model.head_dim"),
)
