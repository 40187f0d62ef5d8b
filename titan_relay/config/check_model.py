"""Can the numbers of [model] be built together, whatever the family?

What a family has of them, and what it needs, is in the family's file.
"""

from collections.abc import Iterator

from titan_relay.config.degrees import divisors, multiples_near, nearest_few
from titan_relay.config.errors import Origins, Refusal, either
from titan_relay.config.schema import ModelConfig, MoEConfig, RunConfig


def check_model(config: RunConfig, origins: Origins) -> None:
    """Raise `ConfigError` for an architecture that cannot be built."""
    model = config.model
    origins.refuse(
        config,
        _check_counts(model),
        _check_dense_layers(model),
        _check_groups(model.moe),
        _check_rope(model),
        _check_longrope(model),
    )


def _check_counts(model: ModelConfig) -> Iterator[Refusal]:
    """Heads share keys evenly; a token has no more experts than there are."""
    moe = model.moe
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        legal = nearest_few(model.num_kv_heads, divisors(model.num_heads))
        yield Refusal(
            "model.num_kv_heads",
            f"must divide model.num_heads = {model.num_heads}; use {either(legal)}",
        )
    if moe.top_k > moe.num_experts:
        yield Refusal(
            "model.moe.top_k", f"must be at most model.moe.num_experts = {moe.num_experts}"
        )


def _check_dense_layers(model: ModelConfig) -> Iterator[Refusal]:
    """Leading dense layers leave at least one with experts, and have a width."""
    if model.num_dense_layers >= model.num_layers:
        yield Refusal(
            "model.num_dense_layers",
            f"must be below model.num_layers = {model.num_layers}, so that a layer has experts",
        )
    if bool(model.num_dense_layers) != bool(model.dense_dim):
        yield Refusal(
            "model.dense_dim",
            f"is the width of the model.num_dense_layers = {model.num_dense_layers} first layers; "
            "give both, or leave both out",
        )


def _check_groups(moe: MoEConfig) -> Iterator[Refusal]:
    """Groups of at least two experts, enough of them allowed to hold a token's top_k."""
    groups, limited, experts = moe.num_expert_groups, moe.num_limited_groups, moe.num_experts
    legal = [each for each in divisors(experts) if each == 1 or experts // each >= 2]
    if groups not in legal:
        yield Refusal(
            "model.moe.num_expert_groups",
            f"must divide model.moe.num_experts = {experts} into groups of 2 or more; "
            f"use {either(nearest_few(groups, legal))}",
        )
    fewest = -(-moe.top_k * groups // experts)
    if not fewest <= limited <= groups:
        choice = str(groups) if fewest == groups else f"{fewest} to {groups}"
        yield Refusal(
            "model.moe.num_limited_groups",
            f"must hold model.moe.top_k = {moe.top_k} experts in groups of {experts // groups} and "
            f"be at most model.moe.num_expert_groups = {groups}; use {choice}",
        )


def _check_rope(model: ModelConfig) -> Iterator[Refusal]:
    rotated = {
        "model.head_dim": model.head_dim,
        "model.mla.qk_rope_head_dim": model.mla.qk_rope_head_dim,
    }
    for path, dim in rotated.items():
        if dim % 2:
            near = either(multiples_near(dim, 2))
            yield Refusal(path, f"must be even for rotary embeddings; use {near}")


def _check_longrope(model: ModelConfig) -> Iterator[Refusal]:
    """Both lists have a factor per wavelength, or LongRoPE is off and they are left out."""
    numbers = model.longrope
    needed = model.head_dim // 2 if numbers.original_max_seq_len else 0
    for name in ("short_factor", "long_factor"):
        factors: tuple[float, ...] = getattr(numbers, name)
        if len(factors) != needed:
            yield Refusal(
                f"model.longrope.{name}",
                f"has {len(factors)} factors; needs {needed}: model.head_dim / 2 with "
                "model.longrope.original_max_seq_len, none without",
            )
        if any(each <= 0 for each in factors):
            yield Refusal(f"model.longrope.{name}", "every factor must be above 0")
