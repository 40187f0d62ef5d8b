"""Whether the tokenizer's ids fit the model's embedding, asked before anything is built."""

from __future__ import annotations

from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, Sources
from titan_relay.data import load_tokenizer


def check_tokenizer(run: RunConfig, sources: Sources) -> None:
    """Refuse a vocabulary larger than the embedding; say how much of it a smaller one uses.

    Raises:
        ConfigError: one line with the smallest vocab_size that fits.
        DataError: the tokenizer cannot be read.
    """
    num_tokens, num_rows = load_tokenizer(run.tokenizer).vocab_size, run.model.vocab_size
    if num_tokens > num_rows:
        raise sources.error(
            "model.vocab_size",
            num_rows,
            f"the tokenizer {run.tokenizer.path} has {num_tokens} tokens; give at least that",
        )
    if num_tokens < num_rows:
        logger.info(
            f"The tokenizer has {num_tokens} tokens, the model's embedding {num_rows} rows: "
            f"{num_rows - num_tokens} rows are never used"
        )
