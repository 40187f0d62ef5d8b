"""Keys that a model's family does not have, or lacks."""

from tests.config.wrong import Wrong, without

PHI = """\
[model]
family = "phimoe"
[model.moe]
score_func = "sparsemixer"
top_k = 2
route_norm = false
"""

FAMILIES = [
    Wrong(
        "head width missing",
        'case.toml: model.head_dim = 0 (default): family "qwen3_moe" needs it; give it as it is '
        "in the model",
        whole=without("head_dim = 16"),
    ),
    Wrong(
        "key heads missing",
        'case.toml: model.num_kv_heads = 0 (default): family "qwen3_moe" needs it; give it as it '
        "is in the model",
        whole=without("num_kv_heads = 2"),
    ),
    Wrong(
        "part that the family has not",
        'case.toml: model.mla.kv_lora_rank = 512: family "qwen3_moe" has no such part (it is for '
        "mla_moe); leave it out",
        toml="[model.mla]\nkv_lora_rank = 512",
    ),
    Wrong(
        "shared expert that the family has not",
        'case.toml: model.moe.shared_expert_dim = 64: family "qwen3_moe" has no such part (it is '
        "for mla_moe or qwen2_moe); leave it out",
        toml="[model.moe]\nshared_expert_dim = 64",
    ),
    Wrong(
        "shared expert missing",
        'case.toml: model.moe.shared_expert_dim = 0 (default): family "qwen2_moe" needs it; give '
        "it as it is in the model",
        toml='[model]\nfamily = "qwen2_moe"',
    ),
]

_MLA = '[model]\nfamily = "mla_moe"\nnum_kv_heads = 0\nhead_dim = 0\n'
_WIDTHS = """
[model.mla]
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
"""

FAMILIES += [
    Wrong(
        "latent attention without widths",
        'case.toml: model.mla.kv_lora_rank = 0 (default): family "mla_moe" needs it; give it as it '
        "is in the model",
        toml=_MLA,
    ),
    Wrong(
        "key heads of latent attention",
        'case.toml: model.num_kv_heads = 4: family "mla_moe" has no such part (it is for '
        "mixtral, phimoe, qwen2_moe or qwen3_moe); leave it out",
        toml='[model]\nfamily = "mla_moe"\nnum_kv_heads = 4\nhead_dim = 0\n' + _WIDTHS,
    ),
    Wrong(
        "odd rotated width",
        "case.toml: model.mla.qk_rope_head_dim = 5: must be even for rotary embeddings; use 4 or 6",
        toml=_MLA + _WIDTHS.replace("rope_head_dim = 4", "rope_head_dim = 5"),
    ),
    Wrong(
        "all layers dense",
        "case.toml: model.num_dense_layers = 4: must be below model.num_layers = 4, so that a "
        "layer has experts",
        toml=_MLA + "num_dense_layers = 4\ndense_dim = 64" + _WIDTHS,
    ),
    Wrong(
        "dense layers without a width",
        "case.toml: model.dense_dim = 0 (default): is the width of the model.num_dense_layers = 1 "
        "first layers; give both, or leave both out",
        toml=_MLA + "num_dense_layers = 1" + _WIDTHS,
    ),
    Wrong(
        "groups of one expert",
        "case.toml: model.moe.num_expert_groups = 16: must divide model.moe.num_experts = 16 into "
        "groups of 2 or more; use 1, 2, 4 or 8",
        toml=_MLA + "[model.moe]\nnum_expert_groups = 16" + _WIDTHS,
    ),
    Wrong(
        "too few groups for a token's experts",
        "case.toml: model.moe.num_limited_groups = 1 (default): must hold model.moe.top_k = 4 "
        "experts in groups of 2 and be at most model.moe.num_expert_groups = 8; use 2 to 8",
        toml=_MLA + "[model.moe]\nnum_expert_groups = 8" + _WIDTHS,
    ),
    Wrong(
        "heads of latent attention over too many ranks",
        "case.toml: parallelism.tensor_parallel_degree = 3: must divide model.num_heads = 4; "
        "use 1, 2 or 4",
        toml=_MLA + _WIDTHS + "[parallelism]\ntensor_parallel_degree = 3",
        ranks=3,
    ),
    Wrong(
        "routing of another family",
        'case.toml: model.moe.score_func = "sparsemixer": family "qwen3_moe" has no such routing; '
        'use "softmax" or "sigmoid"',
        toml='[model.moe]\nscore_func = "sparsemixer"',
    ),
    Wrong(
        "other routing than the family's",
        'case.toml: model.moe.score_func = "softmax": family "phimoe" routes by "sparsemixer"',
        toml='[model]\nfamily = "phimoe"\n[model.moe]\nscore_func = "softmax"',
    ),
    Wrong(
        "more than two picks",
        'good.toml: model.moe.top_k = 4: family "phimoe" picks two experts per token; use 2',
        toml='[model]\nfamily = "phimoe"\n[model.moe]\nscore_func = "sparsemixer"',
    ),
    Wrong(
        "normalised picks",
        'good.toml: model.moe.route_norm = true: family "phimoe" does not normalise its weights; '
        "use false",
        toml='[model]\nfamily = "phimoe"\n[model.moe]\nscore_func = "sparsemixer"\ntop_k = 2',
    ),
    Wrong(
        "bias for sampled picks",
        'case.toml: model.moe.load_balance_coeff = 0.001: family "phimoe" has no balancing bias; '
        "use 0, and model.moe.aux_loss_coeff to balance",
        toml=f"{PHI}load_balance_coeff = 1e-3",
    ),
    Wrong(
        "factors without LongRoPE",
        "case.toml: model.longrope.short_factor = [1.0, 2.0]: has 2 factors; needs 0: "
        "model.head_dim / 2 with model.longrope.original_max_seq_len, none without",
        toml=f"{PHI}[model.longrope]\nshort_factor = [1.0, 2.0]",
    ),
    Wrong(
        "too few factors",
        "case.toml: model.longrope.short_factor = [1.0, 2.0]: has 2 factors; needs 8: "
        "model.head_dim / 2 with model.longrope.original_max_seq_len, none without",
        toml=f"{PHI}[model.longrope]\noriginal_max_seq_len = 64\nshort_factor = [1.0, 2.0]",
    ),
    Wrong(
        "factor of zero",
        "case.toml: model.longrope.short_factor = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]: every "
        "factor must be above 0",
        toml=f"{PHI}[model.longrope]\noriginal_max_seq_len = 64\nshort_factor = {[0.0] * 8}",
    ),
]
