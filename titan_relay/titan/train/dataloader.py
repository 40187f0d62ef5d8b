"""torchtitan's interfaces of a data loader and a tokenizer over `titan_relay.data`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools import utils

from titan_relay.config.schema import DataConfig, TokenizerConfig
from titan_relay.data import LaneReader, PackedRow, PrefetchingReader, load_tokenizer

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class RelayDataLoader(BaseDataLoader):
    """Yields `({"input", "positions", "lanes"}, labels)`, int64 on CPU.

    All are `(local_batch_size, seq_len)` but `lanes`, which numbers the rows within the global
    batch. Padding has label -100 and position -1. When finite data runs out, iteration ends after
    the same number of batches on every rank (one small all-reduce per step sees to that).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        data: DataConfig
        global_batch_size: int
        seed: int
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ):
        lanes_per_rank = config.global_batch_size // dp_world_size
        self._rows_per_step, self._rows_per_batch = lanes_per_rank, local_batch_size
        self._infinite = config.data.infinite
        lanes = range(dp_rank * lanes_per_rank, (dp_rank + 1) * lanes_per_rank)
        self._lanes = torch.tensor(lanes)
        reader = LaneReader(
            config.data,
            tokenizer.inner,
            seq_len=seq_len,
            num_lanes=config.global_batch_size,
            lanes=lanes,
            seed=config.seed,
        )
        # One step's rows are tokenized while the step before it computes.
        self._reader = PrefetchingReader(reader, max_rows_ahead=lanes_per_rank)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            # All lanes' rows of one step: lanes of finite data end at different rows, so only a
            # step that is empty in every lane is the end.
            batch, labels = _to_batch(self._reader.next_rows(self._rows_per_step))
            batch["lanes"] = self._lanes
            if not self._infinite and not _any_rank_has_tokens(labels):
                return
            for start in range(0, self._rows_per_step, self._rows_per_batch):
                rows = slice(start, start + self._rows_per_batch)
                yield {key: value[rows] for key, value in batch.items()}, labels[rows]

    def state_dict(self) -> dict[str, Any]:
        """The reader's position, one entry per lane of this rank."""
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, whatever the number of ranks that wrote it."""
        self._reader.load_state_dict(state_dict)

    def close(self) -> None:
        """End the thread that reads ahead, and close files and streams."""
        self._reader.close()


def _to_batch(rows: PackedRow) -> Batch:
    inputs, labels, positions = (
        torch.from_numpy(rows[key]) for key in ("input", "labels", "positions")
    )
    positions = positions.masked_fill(labels == IGNORE_INDEX, -1)
    return {"input": inputs, "positions": positions}, labels


def _any_rank_has_tokens(labels: torch.Tensor) -> bool:
    count = (labels != IGNORE_INDEX).sum().to(utils.device_type)
    dist.all_reduce(count)
    return bool(count.item())


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
