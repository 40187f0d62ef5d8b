"""What a dry run replaces of the real trainer, handed in through the trainer's configuration.

Fake tensors have a shape and no values. What a step reads from values (initial weights, how many
rows an expert has, what an all-to-all brings) is supplied, chunks of the loss that are all alike
run a few times only, and on fake CPU tensors that stand for CUDA attention and experts take what
they would there. All else is the trainer that trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive, override
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.common.moe import GroupedExperts

from titan_relay.ops import DocumentMask
from titan_relay.titan.model.experts import NativeDtypeExperts
from titan_relay.titan.plan.alltoall import shared_evenly
from titan_relay.titan.plan.loss import FewChunks
from titan_relay.titan.train.trainer import RelayTrainer


class DryTrainer(RelayTrainer):
    """The trainer whose step is run on fake tensors; see `as_dry`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RelayTrainer.Config):
        stands_for_cuda: bool
        """The fake tensors are the CPU's, the run that they stand for is on CUDA."""

    config: Config

    def prepare_cpu_batch(
        self, inputs_BS: torch.Tensor, labels_BS: torch.Tensor, positions_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DocumentMask]:
        """This rank's part of each row, and its mask.

        A flash kernel saves q, k, v, its output and the log-sum-exp, as our op for CPU does; but
        its mask is a list of blocks, and so is left without a place in the batch here.
        """
        if not self.config.stands_for_cuda:
            return super().prepare_cpu_batch(inputs_BS, labels_BS, positions_BS)
        batch = (inputs_BS, labels_BS, positions_BS)
        cp_mesh = self.parallel_dims.get_optional_mesh("cp")
        if cp_mesh is not None:
            balancer = self.config.parallelism.context_parallel_load_balancer
            batch, _ = cp_shard(cp_mesh, batch, None, balancer)
        # Expanded from one number each: they are read, and take no memory.
        number = inputs_BS.new_empty((1, 1), dtype=torch.int32)
        queries_BL, keys_BS = number.expand(batch[0].shape), number.expand(inputs_BS.shape)
        return *batch, DocumentMask(queries_BL, queries_BL, keys_BS)


class DryExperts(NativeDtypeExperts):
    """Experts who share their rows evenly, where nobody knows how many each has."""

    @dataclass(kw_only=True, slots=True)
    class Config(NativeDtypeExperts.Config):
        stands_for_cuda: bool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._stands_for_cuda = config.stands_for_cuda

    def has_grouped_gemm(self, x_RD: torch.Tensor) -> bool:
        """Whether torch's grouped GEMM would serve the device that is stood for."""
        return self._stands_for_cuda and x_RD.dtype == torch.bfloat16

    def rows_per_expert(self, num_rows: int, counts_E: torch.Tensor) -> list[int]:
        """As many for each, in the place of counts read from the device."""
        return shared_evenly(num_rows, counts_E.shape[0])


@override(target=GroupedExperts.Config, description="experts who share rows evenly")
def dry_experts(config: GroupedExperts.Config, *, stands_for_cuda: bool) -> DryExperts.Config:
    """Replace every grouped-experts config."""
    return derive(config, DryExperts.Config, stands_for_cuda=stands_for_cuda)


def as_dry(config: RelayTrainer.Config, *, stands_for_cuda: bool, skew: float) -> DryTrainer.Config:
    """The configuration of the same trainer on fake tensors; takes parts of `config` along.

    skew: see `alltoall`.
    """
    config.model_spec.model.init_seed = None
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = derive(config.loss, FewChunks.Config)
    if config.run.relay.dispatcher == "alltoall":
        config.override.imports = [
            (f"{__name__}.{dry_experts.__name__}", {"stands_for_cuda": stands_for_cuda}),
            ("titan_relay.titan.plan.alltoall.supplied_splits", {"skew": skew}),
        ]
    return derive(config, DryTrainer.Config, stands_for_cuda=stands_for_cuda)
