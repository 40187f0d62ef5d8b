"""What a tokenizer makes of a corpus: bytes per token and the entropy of single tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from titan_relay.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class CorpusStatistics:
    """Counts over whole documents, each with its BOS and EOS as the tokenizer adds them."""

    num_documents: int
    num_bytes: int
    num_tokens: int
    bytes_per_token: float
    unigram_entropy_nats: float
    vocab_size: int


def unigram_entropy_nats(token_counts: np.ndarray) -> float:
    """Entropy of drawing one token of the corpus, ``-sum p ln p``, in nats per token.

    It is the loss of the best model that ignores all context, so a model that has learned
    anything from context is below it. `token_counts` is [vocab_size]; zero counts add nothing.
    """
    counts = token_counts[token_counts > 0].astype(np.float64)
    if not counts.size:
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0  # + 0.0: no negative zero


def corpus_statistics(texts: Iterable[str], tokenizer: Tokenizer) -> CorpusStatistics:
    """Encodes every text once."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    num_documents = num_bytes = 0
    for text in texts:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        counts += np.bincount(ids, minlength=len(counts))
        num_documents += 1
        num_bytes += len(text.encode())
    num_tokens = int(counts.sum())
    return CorpusStatistics(
        num_documents=num_documents,
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        bytes_per_token=num_bytes / max(num_tokens, 1),
        unigram_entropy_nats=unigram_entropy_nats(counts),
        vocab_size=tokenizer.vocab_size,
    )
