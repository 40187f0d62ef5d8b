"""`torch.compile` of the parts of a block that stand still: the attention half and the router.

The block as a whole stays eager: balancing records what it sees in backward, and the ring sends and
receives, neither of which a compiler may reorder or leave out. Compiling the two halves by
themselves also keeps activation checkpointing of the block outside the compiled code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.config import CompileConfig
from torchtitan.tools.logging import logger

from titan_relay.titan.balance_hook import moe_layers


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
