"""Keys that torchtitan has too keep its names and its defaults, except where we say otherwise."""

import dataclasses
from typing import Any

from titan_relay.config.reference import same_in_torchtitan
from titan_relay.config.schema import keys

# Keys whose default is deliberately ours, with the reason.
_OURS = {
    "debug.seed": "a run can be repeated without asking for it",
    "dump_folder": 'torchtitan writes "./outputs", the same folder',
}


def _torchtitan_sections() -> dict[str, list[type]]:
    # Imported here, because torchtitan takes seconds and the other tests do without.
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.validate import Validator
    from torchtitan.config import configs
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC
    from torchtitan.tools.profiler import Profiler
    from torchtitan.trainer import Trainer

    return {
        "": [Trainer.Config],
        "training": [configs.TrainingConfig],
        "parallelism": [configs.ParallelismConfig],
        "optimizer": [OptimizersContainer.Config],
        "lr_scheduler": [LRSchedulersContainer.Config],
        "activation_checkpoint": [FullAC.Config, MemoryBudgetAC.Config],
        "compile": [configs.CompileConfig],
        "checkpoint": [CheckpointManager.Config],
        "validator": [Validator.Config],
        "metrics": [MetricsProcessor.Config],
        "comm": [configs.CommConfig],
        "profiler": [Profiler.Config],
        "debug": [configs.DebugConfig],
    }


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def test_names_and_defaults_are_torchtitans() -> None:
    sections = _torchtitan_sections()
    for key in filter(same_in_torchtitan, keys().values()):
        fields = {
            field.name: field for cls in sections[key.section] for field in dataclasses.fields(cls)
        }
        assert key.name in fields, f"torchtitan has no {key.path}"
        ours = list(key.default) if isinstance(key.default, tuple) else key.default
        if key.path not in _OURS:
            assert ours == _default(fields[key.name]), key.path
