"""Apply the parallelisms to a model, and compile the parts of its blocks that stand still."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.tools.logging import logger

from titan_relay.titan.device import sum_gradients_without_premul
from titan_relay.titan.model.balance import StepContext
from titan_relay.titan.model.balance_hook import moe_layers
from titan_relay.titan.recompute.block_levels import BlockRetention, make_retainable


def parallelize(
    model: Any,
    *,
    parallel_dims: ParallelDims,
    compile_config: CompileConfig,
    ac_config: Any,
    **kwargs: Any,
) -> nn.Module:
    """torchtitan's `parallelize_fn` for every family of this project.

    torchtitan's function for Qwen3 only relies on what all its decoders share (blocks with
    `attention.inner_attention`, `moe_enabled`), so it serves other families too.
    """
    rest = compile_blocks(model, compile_config)
    if isinstance(ac_config, BlockRetention.Config):
        make_retainable(model, ac_config.levels)
    parallel: nn.Module = parallelize_qwen3(
        model, parallel_dims=parallel_dims, compile_config=rest, ac_config=ac_config, **kwargs
    )
    sum_gradients_without_premul(parallel)
    context = _step_context(parallel_dims)
    for _, moe in moe_layers([parallel]):
        moe.step_context = context
    return parallel


def _step_context(parallel_dims: ParallelDims) -> StepContext:
    """The groups over which the auxiliary loss counts tokens."""
    cp_mesh = parallel_dims.get_optional_mesh("cp")
    loss_mesh = parallel_dims.get_optional_mesh("loss")
    tp_mesh = parallel_dims.get_optional_mesh("tp")
    # With experts spread over TP ranks the tokens of a sequence are too; otherwise every TP rank
    # routes all of them.
    tp_groups = [tp_mesh.get_group()] if tp_mesh is not None and parallel_dims.ep_enabled else []
    return StepContext(
        sequence_groups=_groups(cp_mesh) + tp_groups,
        batch_groups=_groups(loss_mesh) + tp_groups,
    )


def _groups(mesh: Any) -> list[dist.ProcessGroup]:
    return [] if mesh is None else [mesh.get_group()]


def compile_blocks(model: nn.Module, config: CompileConfig) -> CompileConfig:
    """Compile what can be compiled; returns the config with the model left out.

    Call it before activation checkpointing and FSDP wrap the blocks: compilation itself happens at
    the first call.
    """
    if not config.enable or "model" not in config.components:
        return config
    blocks: list[Any] = list(model.get_submodule("layers").children())
    for block in blocks:
        block.attend = torch.compile(block.attend, backend=config.backend)
    for _, moe in moe_layers([model]):
        moe.router.compile(backend=config.backend)
    logger.info("Compiling the attention half and the router of every block")
    others = [each for each in config.components if each != "model"]
    return CompileConfig(enable=bool(others), components=others, backend=config.backend)
