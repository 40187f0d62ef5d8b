"""One step of a run on real ranks, measured; every rank of the process group calls alike."""

from __future__ import annotations

import gc

from titan_relay.config import RunConfig
from titan_relay.memory.step_memory import StepMemory
from titan_relay.titan.build import build_trainer_config
from titan_relay.titan.plan.recorder import record_step
from titan_relay.titan.plan.stand_ins import without_files


def measure_steps(
    run: RunConfig, world_size: int, *, num_steps: int = 1, compute_in_float32: bool = True
) -> list[StepMemory]:
    """What this rank's first steps take, on made-up data."""
    config = build_trainer_config(run, world_size, compute_in_float32=compute_in_float32)
    trainer = without_files(config).build()
    try:
        return [record_step(trainer) for _ in range(num_steps)]
    finally:
        trainer.close()
        del trainer
        gc.collect()
