"""What a trainer built to be measured gets: synthetic data and tokenizer, silent reports."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from titan_relay.titan.train.trainer import RelayTrainer


def without_files(config: RelayTrainer.Config) -> RelayTrainer.Config:
    """The same trainer with made-up data, that reads no file and writes none."""
    config.dataloader = SyntheticData.Config(vocab_size=config.run.model.vocab_size)
    config.tokenizer = NoTokenizer.Config()
    config.metrics = SilentMetrics.Config()
    config.checkpoint = replace(config.checkpoint, enable=False)
    config.validator = replace(config.validator, enable=False)
    config.profiler = replace(config.profiler, enable_profiling=False, enable_memory_snapshot=False)
    return config


class SyntheticData(BaseDataLoader):
    """One document of random tokens per row, for ever."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **unused: Any):
        self._vocab_size = config.vocab_size
        self._shape = (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(self._vocab_size, self._shape)
            positions = torch.arange(self._shape[1]).expand(self._shape).contiguous()
            lanes = torch.arange(self._shape[0])
            batch = {"input": tokens, "positions": positions, "lanes": lanes}
            yield batch, tokens.roll(-1, dims=1)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to continue from."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to continue from."""

    def close(self) -> None:
        """Nothing is open."""


class NoTokenizer(BaseTokenizer):
    """Encodes nothing; synthetic data has token ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """No ids."""
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """No text."""
        return ""

    def get_vocab_size(self) -> int:
        """No tokens."""
        return 0


class SilentMetrics(MetricsProcessor):
    """Reports nothing; what the trainer's loop writes to is there."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    is_metrics_rank = False

    def __init__(self, config: Config, **unused: Any):
        self.color = NoColor()
        self.device_memory_monitor = SimpleNamespace(
            device_name="none", get_peak_stats=lambda: DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
        )
        self.num_flops_per_token = -1
        self.optimizers = None
        self.model_parts = None
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []

    def should_log(self, step: int) -> bool:
        """Never, so that a step reads no number back from its tensors."""
        return False

    def add_curves(self, *args: Any, **kwargs: Any) -> None:
        """Curves go nowhere."""

    def step_memory(self, step: int) -> AbstractContextManager[None]:
        """The recorder measures."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def silenced() -> Iterator[None]:
    """Keep torchtitan's story of building a trainer to itself: none of it is news here."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
