"""Every private name of torchtitan that this project uses, and every patch of torchtitan: here and
nowhere else.

Private is a name that begins with one underscore. Each stands here behind a public name that says
why torchtitan's public names do not do; private methods that our subclasses replace are listed in
`REPLACED_METHODS`, because a method that torchtitan renames would go on existing here and never be
called. `tests/titan/test_private_torchtitan.py` tries each. Tested with torchtitan 0.3.0.

Nothing of torchtitan is imported with this module: see `adapt_torchtitan`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titan_relay.moe import set_ring_timeout
from titan_relay.private_torch import outside_fake, real_device_meshes, set_group_timeout

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

REPLACED_METHODS: dict[str, tuple[str, ...]] = {
    # One rule for what is a checkpoint, a last one that is a whole Hugging Face folder, one more
    # before an early end, no end before a thread has saved, and a line where a save fails; the
    # public methods ask first whether checkpoints are on.
    "torchtitan.components.checkpointer.CheckpointManager": (
        "_close",
        "_find_load_step",
        "_load",
        "_purge_stale_checkpoints",
        "_save",
        "_save_last_step",
        "_should_save",
        "_wait_for_saving",
    ),
    # What a block keeps is decided per block; the class has no public method for one block.
    "torchtitan.distributed.activation_checkpoint.ActivationCheckpointing": ("_wrap_block",),
    "torchtitan.distributed.activation_checkpoint.SelectiveAC": ("_wrap_block",),
    # The bias on the choice of experts is there without a coefficient too.
    "torchtitan.models.common.moe.MoE": ("_init_self_buffers",),
    # A dry run has no values to read the splits of the all-to-all from.
    "torchtitan.models.common.token_dispatcher.AllToAllTokenDispatcher": (
        "_local_reorder",
        "_sync_token_count_exchange",
    ),
}


def adapt_torchtitan(*, cpu: bool) -> None:
    """Make torchtitan use the CPU if `cpu`, and set timeouts on torch 2.13 everywhere.

    `torchtitan.tools.utils` falls back to "cuda" when it finds no accelerator, and other modules
    copy `device_type`, `device_module` and `get_local_device` when they are imported, so this must
    run before them. `torch.cpu` lacks the memory functions of an accelerator module, but their only
    caller, the memory monitor, is replaced by `metrics`.
    """
    if cpu:
        import torchtitan.tools.utils as utils

        cpu_module: ModuleType = torch.cpu
        utils.device_type = "cpu"
        utils.device_module = cpu_module
        utils.get_local_device = _cpu_device
        utils.get_peak_flops = _no_peak_flops

    if find_spec("tensorboard") is None:
        # `torchtitan.components.metrics` imports the writer even where nothing is written.
        unwritten = ModuleType("torch.utils.tensorboard")
        vars(unwritten)["SummaryWriter"] = None
        sys.modules[unwritten.__name__] = unwritten

    import torchtitan.distributed.utils as distributed_utils

    distributed_utils.set_pg_timeouts = functools.partial(_set_timeouts, cpu=cpu)


def _cpu_device() -> torch.device:
    """This process's device. Without an index: DTensor refuses to mix `cpu` and `cpu:0`."""
    return torch.device("cpu")


def _no_peak_flops(device_name: str) -> float:
    """A CPU has no peak to compare with; torchtitan would assume that of an A100."""
    return math.nan


def _set_timeouts(timeout: timedelta, parallel_dims: ParallelDims, *, cpu: bool) -> None:
    """Give every mesh's group, and the ring over the experts' group, the training timeout.

    torchtitan's own needs `torch.distributed.set_timeout` of torch 2.14, passes device ids to the
    barrier (gloo rejects them) and synchronises a device. The barrier keeps a fast rank from timing
    out on a slow one that is still in its first step.
    """
    dist.barrier(device_ids=None if cpu else [torch.accelerator.current_device_index()])
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [mesh.get_group() for mesh in meshes]:
        set_group_timeout(timeout, group)
        set_ring_timeout(group, timeout)
    set_group_timeout(timeout, None)


@contextmanager
def set_up_outside_fake() -> Iterator[None]:
    """Let a trainer that is built inside a fake mode work out meshes and seeds with real numbers.

    Both are computed from tensors while it sets up, and neither takes memory that counts.
    """
    from torchtitan.distributed import ParallelDims, utils

    with ExitStack() as stack:
        stack.enter_context(real_device_meshes())
        for owner, name in ((ParallelDims, "build_mesh"), (utils, "set_determinism")):
            original = getattr(owner, name)
            setattr(owner, name, outside_fake(original))
            stack.callback(setattr, owner, name, original)
        yield


def metrics_rank(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The rank that has the loss, which torchtitan's trainer asks for everywhere else too."""
    from torchtitan.components import metrics

    rank: int = metrics._get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
    return rank


def loggers_of(logger: Any) -> Sequence[Any]:
    """The loggers that a `LoggerContainer` writes to; none of a logger that is no container."""
    loggers: Sequence[Any] = getattr(logger, "_loggers", ())
    return loggers


def head_is_left_out(decoder: Any) -> bool:
    """Whether a `Decoder` returns hidden states, because a chunked loss applies its head."""
    left_out: bool = decoder._skip_lm_head
    return left_out


def routes_evenly(router: Any) -> bool:
    """Whether `debug.moe_force_load_balance` is on, which a `TokenChoiceTopKRouter` keeps so."""
    evenly: bool = router._debug_force_load_balance
    return evenly


def even_routing(router: Any, probs_BLE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of experts taken in turn, and their scores, `(B, L, K)` each."""
    ids_BLK, scores_BLK = router._debug_force_load_balance_routing(probs_BLE)
    return ids_BLK, scores_BLK


def scores_in_groups(router: Any, choice_BLE: torch.Tensor) -> torch.Tensor:
    """The scores to choose by, with those of experts outside the best groups out of reach."""
    scores_BLE: torch.Tensor = router._get_node_limited_routing_scores(choice_BLE)
    return scores_BLE
