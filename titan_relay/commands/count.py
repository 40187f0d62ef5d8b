"""How many parameters a configuration's model has, and what a token costs in training.

    titan-relay count --config FILE.toml

Further arguments are configuration keys, as for train: `--training.seq_len 32768`. Needs no memory:
the model is built without its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_relay.commands import arguments as arg
from titan_relay.config import RunConfig, load_config
from titan_relay.validate import validate_model


def main(arguments: Sequence[str]) -> int:
    args, keys = arg.parse_with_keys(parser(), arguments)
    loaded = load_config(["--config", args.config, *keys])
    validate_model(loaded.config, loaded.origins)
    print(_report(loaded.config))
    return 0


def parser() -> arg.CommandParser:
    """The command's options."""
    made = arg.command_parser("count", __doc__)
    arg.add_config(made)
    return made


def _report(run: RunConfig) -> str:
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
