"""A small correct configuration on disk, for tests to change in one place."""

from pathlib import Path

GOOD = """\
[model]
family = "qwen3_moe"
dim = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 16
vocab_size = 512
max_seq_len = 4096
rope_theta = 1e6
norm_eps = 1e-6
tie_word_embeddings = false

[model.moe]
num_experts = 16
top_k = 4
expert_dim = 32
score_func = "softmax"
route_norm = true

[training]
local_batch_size = 2
seq_len = 128
steps = 20

[data]
files = ["corpus/*.jsonl"]

[tokenizer]
path = "tokenizer.tiktoken"
eos_token = "<|endoftext|>"
special_tokens = { "<|endoftext|>" = 511 }
"""


def write_good(folder: Path) -> Path:
    """Write ``good.toml`` and the data and tokenizer files that it names; returns its path."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "train.jsonl").write_text('{"text": "a"}\n')
    (folder / "corpus" / "notes.md").write_text("no corpus\n")
    (folder / "tokenizer.tiktoken").write_text("IQ== 0\n")
    path = folder / "good.toml"
    path.write_text(GOOD)
    return path
