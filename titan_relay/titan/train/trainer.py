"""The trainer: torchtitan's, with relay experts, balancing, repeatable steps and CPU batches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.distributed.utils import dist_sum_tensor
from torchtitan.trainer import Trainer

from titan_relay.config.schema import RunConfig
from titan_relay.ops import DocumentMask
from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.curves import StepCurves
from titan_relay.titan.metrics.processor import RelayMetricsProcessor
from titan_relay.titan.metrics.rows import RowCurves
from titan_relay.titan.model.attention import prepare_cpu_batch
from titan_relay.titan.model.balance_hook import BalanceStep, moe_layers
from titan_relay.titan.model.finite import FiniteCheck
from titan_relay.titan.model.random_numbers import key_of, random_bits
from titan_relay.titan.recompute.block_levels import BlockRetention
from titan_relay.titan.recompute.choice import RetentionChoice
from titan_relay.titan.train.checkpoint import RelayCheckpointManager
from titan_relay.titan.train.dataloader import RelayDataLoader
from titan_relay.titan.train.early_end import EarlyEnd
from titan_relay.titan.train.relay_setup import expected_relay, warm_up_kernels


class StepObserver:
    """Told where a trainer's steps begin and end; does nothing with it."""

    def before_step(self, *, has_optimizer_state: bool) -> None:
        """A step begins; without an optimizer's state if it is the first of a new run."""

    def before_microbatch(self) -> None:
        """A forward and backward begin, within a step."""

    def after_microbatch(self) -> None:
        """They are over; the next one or the optimizer follows."""

    def after_step(self, step: int) -> None:
        """Step number `step` is over, and reported if it was due."""


class RelayTrainer(Trainer):
    """Trains one run; see `torchtitan.trainer.Trainer` for the loop."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        run: RunConfig

    config: Config
    metrics_processor: RelayMetricsProcessor
    dataloader: RelayDataLoader
    checkpointer: RelayCheckpointManager
    early_end: EarlyEnd

    def __init__(self, config: Config):
        super().__init__(config)
        self.early_end = EarlyEnd()
        model = config.run.model
        self._samples = model.moe.score_func == "sparsemixer"
        tokens_are_repeated = self.parallel_dims.tp_enabled and not self.parallel_dims.ep_enabled
        self.finite = FiniteCheck(
            self.model_parts,
            num_layers=model.num_layers,
            max_skipped=config.run.training.max_skipped_steps,
            device=self.device,
        )
        self.balance = BalanceStep(
            self.model_parts,
            check=self.finite,
            layer_ids=range(model.num_dense_layers, model.num_layers),
            num_experts=model.moe.num_experts,
            num_copies=self.parallel_dims.tp if tokens_are_repeated else 1,
            device=self.device,
            requests=lambda: self.early_end.requests(),
        )
        self.optimizers.register_step_pre_hook(self.balance)
        curves = StepCurves(self.balance, self.model_parts)
        expected = expected_relay(config.run, self.parallel_dims.world_size)
        if expected is not None:
            self.metrics_processor.add_curves(expected.curves)
        self.retention: RetentionChoice | None = None
        if isinstance(config.activation_checkpoint, BlockRetention.Config):
            levels = config.activation_checkpoint.levels
            itemsize = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
            self.retention = RetentionChoice(
                config.run,
                self.parallel_dims.world_size,
                levels,
                itemsize=itemsize,
                device=self.device,
                local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            )
            self.metrics_processor.add_curves(self.retention.curves)
        self.rows = RowCurves(
            self.parallel_dims,
            has_loss=not self.parallel_dims.pp_enabled or self.pp_has_last_stage,
            tokens_per_step=config.training.global_batch_size * config.training.seq_len,
            device=self.device,
        )
        self.metrics_processor.add_curves(self.rows.curves)
        self.metrics_processor.add_curves(self.finite.skipped.curves)
        self.metrics_processor.add_curves(curves.balance)
        self.metrics_processor.add_curves(curves.relay, over="mean")
        self.metrics_processor.add_curves(curves.relay_wait, over="max")
        self.curves = curves
        self._observer = StepObserver()
        self._num_microbatches = 0  # of this step; a comparison runs one outside of any

    @contextmanager
    def observed(self, observer: StepObserver) -> Iterator[None]:
        """Tell `observer` of the steps that are run inside, in the place of any other."""
        usual, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = usual

    def train(self) -> None:
        """Have the experts' kernels compiled, then train."""
        warm_up_kernels(self.config.run, self.parallel_dims.world_size, self.device)
        super().train()
        self.checkpointer.maybe_wait_for_saving()  # and raise what a thread came to

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Run one optimizer step.

        The random state is a function of seed and step, so a resumed run draws what the
        uninterrupted one drew, on any layout, and nothing needs saving.
        """
        torch.manual_seed(step_seed(self.config.run.debug.seed, self.step))
        self.balance.step = self.step
        self.curves.begin_step()
        self.finite.begin_step()
        self._num_microbatches = 0
        self.rows.begin_step(is_reported=self.metrics_processor.should_log(self.step))
        has_state = any(optimizer.state for optimizer in self.optimizers.optimizers)
        self._observer.before_step(has_optimizer_state=has_state)
        with self.metrics_processor.step_memory(self.step):
            super().train_step(data_iterator)
        self.checkpointer.save_next = any(self.balance.asked)
        self.curves.end_step()
        if self.retention is not None:
            self.retention.after_step()
        self._observer.after_step(self.step)

    def should_continue_training(self) -> bool:
        """Whether another step follows."""
        return super().should_continue_training() and not any(self.balance.asked)

    @property
    def ended_early(self) -> bool:
        """Whether steps are left that were not taken because `early_end` asked some rank."""
        return self.step < self.config.training.steps and any(self.balance.asked)

    def forward_backward_step(self, *, global_valid_tokens: torch.Tensor, **batch: Any) -> Any:
        """Run one microbatch forward and backward.

        Returns its loss, with 0 for one that is not finite: torchtitan would end the run where it
        reports such a loss, after the weights changed.
        """
        for _, moe in moe_layers(self.model_parts):
            moe.step_context.num_valid_tokens = global_valid_tokens
        self._observer.before_microbatch()
        loss = super().forward_backward_step(global_valid_tokens=global_valid_tokens, **batch)
        self._observer.after_microbatch()
        # Without a mesh nothing is reduced, but a DTensor becomes this rank's plain tensor.
        loss = dist_sum_tensor(loss.detach())
        self.rows.add_loss(loss, global_valid_tokens)
        self.finite.add_loss(loss)
        self._num_microbatches += 1
        if self._num_microbatches == self.gradient_accumulation_steps:
            self.finite.add_gradients()
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Take this rank's part of the batch and build attention masks; key tokens for sampling."""
        input_dict = dict(input_dict)
        lanes_B, seq_len = input_dict.pop("lanes", None), labels.shape[1]
        inputs, labels, extra = self._cut_batch(input_dict, labels)
        self.rows.add_labels(labels)
        if self._samples and self.model_parts[0].training:
            assert lanes_B is not None, "rows must be numbered where the model samples"
            extra["token_keys"] = self._token_keys(lanes_B, seq_len)
        return inputs, labels, extra

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the trainer itself; the same on every rank."""
        tokens = self.rows.saved_tokens() + self.finite.skipped.saved()
        return {"step": self.step, "ntokens_seen": tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, whatever the number of ranks that wrote it."""
        self.step = state_dict["step"]
        self.rows.load_tokens(state_dict["ntokens_seen"], self.step)
        self.finite.skipped.load(state_dict["ntokens_seen"])

    def close(self) -> None:
        """Close files and end threads."""
        with closing(self.dataloader):
            super().close()

    def _token_keys(self, lanes_B: torch.Tensor, seq_len: int) -> torch.Tensor:
        """A key per token of this rank, from seed, step, global row and place in the row."""
        index_BS = lanes_B[:, None] * seq_len + torch.arange(seq_len, device=lanes_B.device)
        cp_mesh = self.parallel_dims.get_optional_mesh("cp")
        if cp_mesh is not None:
            balancer = self.config.parallelism.context_parallel_load_balancer
            (index_BS,), _ = cp_shard(cp_mesh, (index_BS,), None, balancer)
        return token_keys(index_BS, self.config.run.debug.seed, self.step)

    def _cut_batch(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if not on_cpu():
            return super().post_dataloading_process(input_dict, labels)
        inputs, labels, positions, mask = self.prepare_cpu_batch(
            input_dict["input"], labels, input_dict["positions"]
        )
        return inputs, labels, {"positions": positions, "attention_masks": mask}

    def prepare_cpu_batch(
        self, inputs_BS: torch.Tensor, labels_BS: torch.Tensor, positions_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DocumentMask]:
        """This rank's part of each row, and the mask of our op for CPU."""
        return prepare_cpu_batch(
            inputs_BS,
            labels_BS,
            positions_BS,
            self.parallel_dims.get_optional_mesh("cp"),
            self.config.parallelism.context_parallel_load_balancer,
        )


def step_seed(seed: int, step: int) -> int:
    """The random seed of one step of one run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/step {step}".encode()).digest()[:8], "little")


def token_keys(index: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """int64 keys of a step's tokens, which are numbered through the whole global batch."""
    return random_bits(index, key_of(f"{seed}/tokens of step {step}"))
