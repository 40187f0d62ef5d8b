"""One step of a run on real ranks, measured; every rank of the process group calls alike."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from titan_relay.config import RunConfig, with_settings
from titan_relay.measure.step_memory import StepMemory
from titan_relay.titan.plan.recorder import record_step
from titan_relay.titan.plan.synthetic import silenced, without_files
from titan_relay.titan.train.build import build_trainer_config
from titan_relay.titan.train.trainer import RelayTrainer


@contextmanager
def small_trainer(
    run: RunConfig, world_size: int, *, num_steps: int, compute_in_float32: bool = False
) -> Iterator[RelayTrainer]:
    """The run's trainer on made-up data, silent, for ``num_steps`` steps, gone at the end."""
    if run.training.steps < num_steps:  # a schedule refuses steps beyond its end
        run = with_settings(run, {"training.steps": num_steps})
    with silenced():
        config = build_trainer_config(run, world_size, compute_in_float32=compute_in_float32)
        trainer = without_files(config).build()
        try:
            yield trainer
        finally:
            trainer.close()
            del trainer
            gc.collect()


def measure_steps(
    run: RunConfig, world_size: int, *, num_steps: int = 1, compute_in_float32: bool = True
) -> list[StepMemory]:
    """What this rank's first steps take."""
    with small_trainer(
        run, world_size, num_steps=num_steps, compute_in_float32=compute_in_float32
    ) as trainer:
        return [record_step(trainer) for _ in range(num_steps)]


def measure_steady_bytes(run: RunConfig, world_size: int, *, num_steps: int = 4) -> int:
    """This rank's peak of live bytes in a step after the first: the lowest of all but the first.

    Equal steps take equal bytes, but a thread of gloo may hold a buffer of a collective that has
    ended for a moment longer, and that moment may be the peak's. That only ever adds.
    """
    steps = measure_steps(run, world_size, num_steps=num_steps)
    return min(step.first.live_bytes for step in steps[1:])
