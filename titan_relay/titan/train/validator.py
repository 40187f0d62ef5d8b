"""Validation: torchtitan's loop over our batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import Validator

from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.processor import RelayMetricsProcessor
from titan_relay.titan.model.attention import prepare_cpu_batch


class RelayValidator(Validator):
    """Validates on the same rows whatever the layout of the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        last_step: int
        """The run's last step, after which it validates whatever `freq` says."""

    config: Config

    def should_validate(self, step: int) -> bool:
        """After the first step, every `freq` steps, and after the last."""
        return super().should_validate(step) or step == self.config.last_step

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate after `step`; its time and tokens do not count as training's."""
        assert isinstance(self.metrics_processor, RelayMetricsProcessor)
        with self.metrics_processor.validating():
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
