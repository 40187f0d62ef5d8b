"""Prints how many parameters a configuration's model has, and what a token costs in training.

    python scripts/count_params.py --config train_configs/qwen3_30b_a3b.toml

Takes the arguments of train.py, so any key can be changed: `--training.seq_len 32768`. Needs no
memory: the model is built without its weights.
"""

from __future__ import annotations

import sys

from titan_relay.config import ConfigError, RunConfig, load_config
from titan_relay.validate import validate_model


def main(arguments: list[str]) -> int:
    """Count and print; a wrong configuration is one line and exit code 2."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    try:
        loaded = load_config(arguments)
        validate_model(loaded.config, loaded.sources)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(loaded.config))
    return 0


def report(run: RunConfig) -> str:
    """The table that is printed."""
    from titan_relay.titan.model.counts import count  # torchtitan takes seconds to import

    model, moe, seq_len = run.model, run.model.moe, run.training.seq_len
    counts = count(model, seq_len)
    rows = [
        ("total", counts.total, ""),
        ("active", counts.active, f"of a token: {moe.top_k} of {moe.num_experts} routed experts"),
        ("routed", counts.routed, "experts that tokens are sent to by choice"),
        ("embedding", counts.embedding, ""),
        ("head", counts.head, "shares the embedding" if model.tie_word_embeddings else ""),
    ]
    lines = [f"{model.family}, {model.num_layers} layers, parameters:"]
    lines += [f"{name:10}{n:>15}  {n / 1e9:7.3f} B  {note}".rstrip() for name, n, note in rows]
    flops = counts.flops_per_token
    lines.append(f"training FLOPs per token: {flops} ({flops / 1e9:.2f} G, {seq_len} tokens long)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
