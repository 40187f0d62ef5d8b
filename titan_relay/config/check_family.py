"""Has the model the keys that its family needs, and none that it does not know?

A key that not every family has is 0 where it means nothing. What is left out is refused just like
what is too much: a number that nothing reads would be a silent mistake.
"""

from typing import Any

from titan_relay.config.degrees import divisors, multiples_near, nearest_few
from titan_relay.config.expectation import either
from titan_relay.config.keys import keys
from titan_relay.config.schema import ModelConfig, RunConfig
from titan_relay.config.settings import Sources

_MLA = ("mla_moe",)
_SHARED = ("mla_moe", "qwen2_moe")
# Keys that only some families have.
_ONLY = {
    "model.num_dense_layers": _MLA,
    "model.dense_dim": _MLA,
    "model.moe.shared_expert_dim": _SHARED,
    "model.moe.num_expert_groups": _MLA,
    "model.moe.num_limited_groups": _MLA,
    "model.mla.q_lora_rank": _MLA,
    "model.mla.kv_lora_rank": _MLA,
    "model.mla.qk_nope_head_dim": _MLA,
    "model.mla.qk_rope_head_dim": _MLA,
    "model.mla.v_head_dim": _MLA,
    "model.mla.latent_norm_eps": _MLA,
}
# Keys that all families but some have.
_NOT = {"model.num_kv_heads": _MLA, "model.head_dim": _MLA}
# Keys that a family which has them cannot do without.
_NEEDED = (
    "model.num_kv_heads",
    "model.head_dim",
    "model.mla.kv_lora_rank",
    "model.mla.qk_nope_head_dim",
    "model.mla.qk_rope_head_dim",
    "model.mla.v_head_dim",
)


def check_family(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a key that the family lacks or does not have."""
    family = config.model.family
    for path in (*_ONLY, *_NOT):
        value, default = _value(config, path), keys()[path].default
        has = family in _ONLY[path] if path in _ONLY else family not in _NOT[path]
        if not has and value != default:
            others = f" (it is for {either(list(_ONLY[path]))})" if path in _ONLY else ""
            raise sources.error(
                path, value, f'family "{family}" has no such part{others}; leave it out'
            )
        if has and path in _NEEDED and not value:
            raise sources.error(
                path, value, f'family "{family}" needs it; give it as it is in the model'
            )
    if family == "qwen2_moe" and not config.model.moe.shared_expert_dim:
        raise sources.error(
            "model.moe.shared_expert_dim",
            0,
            f'family "{family}" needs it; give it as it is in the model',
        )
    _check_dense_layers(config.model, sources)
    _check_groups(config, sources)
    _check_rope(config, sources)


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _check_dense_layers(model: ModelConfig, sources: Sources) -> None:
    """Leading dense layers leave at least one with experts, and have a width."""
    if model.num_dense_layers >= model.num_layers:
        raise sources.error(
            "model.num_dense_layers",
            model.num_dense_layers,
            f"must be below model.num_layers = {model.num_layers}, so that a layer has experts",
        )
    if bool(model.num_dense_layers) != bool(model.dense_dim):
        raise sources.error(
            "model.dense_dim",
            model.dense_dim,
            f"is the width of the model.num_dense_layers = {model.num_dense_layers} first layers; "
            "give both, or leave both out",
        )


def _check_groups(config: RunConfig, sources: Sources) -> None:
    """Groups of at least two experts, enough of them allowed to hold a token's top_k."""
    moe = config.model.moe
    groups, limited, experts = moe.num_expert_groups, moe.num_limited_groups, moe.num_experts
    legal = [each for each in divisors(experts) if each == 1 or experts // each >= 2]
    if groups not in legal:
        raise sources.error(
            "model.moe.num_expert_groups",
            groups,
            f"must divide model.moe.num_experts = {experts} into groups of 2 or more; "
            f"use {either([str(each) for each in nearest_few(groups, legal)])}",
        )
    fewest = -(-moe.top_k * groups // experts)
    if not fewest <= limited <= groups:
        choice = str(groups) if fewest == groups else f"{fewest} to {groups}"
        raise sources.error(
            "model.moe.num_limited_groups",
            limited,
            f"must hold model.moe.top_k = {moe.top_k} experts in groups of {experts // groups} and "
            f"be at most model.moe.num_expert_groups = {groups}; use {choice}",
        )


def _check_rope(config: RunConfig, sources: Sources) -> None:
    for path in ("model.head_dim", "model.mla.qk_rope_head_dim"):
        dim = _value(config, path)
        if dim % 2:
            near = [str(each) for each in multiples_near(dim, 2)]
            raise sources.error(
                path, dim, f"must be even for rotary embeddings; use {either(near)}"
            )
