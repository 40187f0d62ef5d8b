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
_PHI = ("phimoe",)
# Keys that only some families have.
_ONLY = {
    "model.num_dense_layers": _MLA,
    "model.dense_dim": _MLA,
    "model.moe.shared_expert_dim": _SHARED,
    "model.moe.num_expert_groups": _MLA,
    "model.moe.num_limited_groups": _MLA,
    "model.moe.router_jitter": _PHI,
    "model.moe.input_jitter": _PHI,
    "model.longrope.original_max_seq_len": _PHI,
    "model.longrope.short_factor": _PHI,
    "model.longrope.long_factor": _PHI,
    "model.longrope.short_mscale": _PHI,
    "model.longrope.long_mscale": _PHI,
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
    _check_sparsemixer(config, sources)
    _check_longrope(config.model, sources)


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


def _check_sparsemixer(config: RunConfig, sources: Sources) -> None:
    """SparseMixer is Phi's and Phi's only; its two weights are what they are."""
    moe, phi = config.model.moe, config.model.family in _PHI
    if phi != (moe.score_func == "sparsemixer"):
        fix = (
            'family "phimoe" routes by "sparsemixer"'
            if phi
            else f'family "{config.model.family}" has no such routing; use "softmax" or "sigmoid"'
        )
        raise sources.error("model.moe.score_func", moe.score_func, fix)
    if not phi:
        return
    if moe.top_k != 2:
        raise sources.error(
            "model.moe.top_k", moe.top_k, "sparsemixer picks two experts per token; use 2"
        )
    if moe.route_norm:
        raise sources.error(
            "model.moe.route_norm", True, "sparsemixer does not normalise its weights; use false"
        )
    if moe.load_balance_coeff:
        raise sources.error(
            "model.moe.load_balance_coeff",
            moe.load_balance_coeff,
            "sparsemixer has no balancing bias; use 0, and model.moe.aux_loss_coeff to balance",
        )


def _check_longrope(model: ModelConfig, sources: Sources) -> None:
    """Both lists have a factor per wavelength, or LongRoPE is off and they are left out."""
    numbers = model.longrope
    needed = model.head_dim // 2 if numbers.original_max_seq_len else 0
    for name in ("short_factor", "long_factor"):
        factors: tuple[float, ...] = getattr(numbers, name)
        if len(factors) != needed:
            raise sources.error(
                f"model.longrope.{name}",
                list(factors),
                f"has {len(factors)} factors; needs {needed}: model.head_dim / 2 with "
                "model.longrope.original_max_seq_len, none without",
            )
        if any(each <= 0 for each in factors):
            raise sources.error(
                f"model.longrope.{name}", list(factors), "every factor must be above 0"
            )
