"""Validation: torchtitan's loop over our batches."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator

from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.processor import RelayMetricsProcessor
from titan_relay.titan.model.attention import prepare_cpu_batch
from titan_relay.titan.train.dataloader import RelayDataLoader


class _Opened:
    """Builds data loaders as `config` does, and closes them."""

    def __init__(self, config: BaseDataLoader.Config) -> None:
        self._config = config
        self._loaders = ExitStack()

    def build(self, **parts: Any) -> RelayDataLoader:
        loader: RelayDataLoader = self._config.build(**parts)
        return self._loaders.enter_context(closing(loader))

    def close(self) -> None:
        self._loaders.close()


class RelayValidator(Validator):
    """Validates on the same rows whatever the layout of the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        last_step: int
        """The run's last step, after which it validates whatever `freq` says."""

    config: Config

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        # torchtitan's loop builds a loader each time, and keeps it to itself.
        self.dl_config = self._opened = _Opened(config.dataloader)

    def should_validate(self, step: int) -> bool:
        """After the first step, every `freq` steps, and after the last."""
        return super().should_validate(step) or step == self.config.last_step

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate after `step`; its time and tokens do not count as training's."""
        assert isinstance(self.metrics_processor, RelayMetricsProcessor)
        with self.metrics_processor.validating(), closing(self._opened):
            super().validate(model_parts, step)

    def post_dataloading_process(
        self,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        model_parts: list[nn.Module],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Take this rank's part of the batch and build attention masks. Nothing is sampled."""
        input_dict = {key: value for key, value in input_dict.items() if key != "lanes"}
        if not on_cpu():
            return super().post_dataloading_process(input_dict, labels, model_parts)
        inputs, labels, positions, mask = prepare_cpu_batch(
            input_dict["input"],
            labels,
            input_dict["positions"],
            self.parallel_dims.get_optional_mesh("cp"),
            self.parallelism.context_parallel_load_balancer,
        )
        return inputs, labels, {"positions": positions, "attention_masks": mask}
