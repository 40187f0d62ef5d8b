"""Keys that a model's family does not have, or lacks."""

from tests.config.wrong import Wrong, without

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
