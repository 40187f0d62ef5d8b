"""torchtitan's tokenizer interface over `titan_relay.data`'s tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.components.tokenizer import BaseTokenizer

from titan_relay.config.schema import TokenizerConfig
from titan_relay.data import load_tokenizer


class RelayTokenizer(BaseTokenizer):
    """Encodes documents as `[tokenizer]` says."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        settings: TokenizerConfig

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()
        self.inner = load_tokenizer(config.settings)
        self.eos_id = self.inner.eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of one document, with the BOS and EOS that `[tokenizer]` asks for."""
        return self.inner.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        return self.inner.decode(token_ids)

    def get_vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.inner.vocab_size
