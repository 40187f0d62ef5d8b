"""Metrics on two ranks: who writes, what is reduced, and that all stop alike."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.distributed import run_ranks
from titan_relay.titan.metrics.folder_lock import FolderError, FolderLock
from titan_relay.titan.metrics.over_ranks import over_ranks, raise_together
from titan_relay.titan.metrics.processor import RelayMetricsProcessor

WORLD_SIZE = 2


def build(folder: str, *, pp: int = 1, **config) -> RelayMetricsProcessor:
    dims = SimpleNamespace(
        world_size=WORLD_SIZE, non_data_parallel_size=pp, pp_enabled=pp > 1, pp=pp
    )
    processor = RelayMetricsProcessor.Config(
        log_freq=1, enable_tensorboard=True, total_steps=2, **config
    ).build(parallel_dims=dims, dump_folder=folder)
    processor.num_flops_per_token = 1
    return processor


def check_reductions() -> None:
    rank = dist.get_rank()
    values = {"a": float(rank), "b": 10.0 + rank}
    assert over_ranks(values, "max") == {"a": 1.0, "b": 11.0}
    assert over_ranks(values, "sum") == {"a": 1.0, "b": 21.0}
    assert over_ranks(values, "mean") == {"a": 0.5, "b": 10.5}
    assert over_ranks({}, "max") == {}
    raise_together(None)
    with pytest.raises(FolderError, match="bad"):
        raise_together("bad" if rank == 1 else None)


def report_two_steps(folder: str, **config) -> None:
    processor = build(folder, **config)
    rank = dist.get_rank()
    processor.add_curves(lambda: {"relay/bytes_sent": 100.0 + rank}, over="sum")
    processor.add_curves(lambda: {"relay/wait_seconds": float(rank)}, over="max")
    for step in (1, 2):
        with processor.step_memory(step):
            processor.should_log(step)
            processor.log(step, 1.0, 1.0, 1.0)
        processor.log_validation(2.0, step)
    processor.close()
    dist.barrier()


def check_all_stop_when_a_folder_is_taken(folder: str) -> None:
    # Held by rank 1's process; the metrics rank is 0, and rank 1 has to hear of it.
    lock = FolderLock(Path(folder, "tb")) if dist.get_rank() == 1 else None
    dist.barrier()
    with pytest.raises(FolderError, match="another run is writing there"):
        build(folder)
    # A rank with a folder of its own must let go of it when another's is taken.
    if lock is not None:
        lock.release()
    lock = FolderLock(Path(folder, "tb", "rank_1")) if dist.get_rank() == 0 else None
    dist.barrier()
    with pytest.raises(FolderError, match="rank_1: another run"):
        build(folder, save_for_all_ranks=True)
    if lock is not None:
        lock.release()
    dist.barrier()
    build(folder, save_for_all_ranks=True).close()


def run_checks(folder: str) -> None:
    check_reductions()
    report_two_steps(f"{folder}/one")
    report_two_steps(f"{folder}/all", save_for_all_ranks=True)
    report_two_steps(f"{folder}/pipeline", pp=2)
    check_all_stop_when_a_folder_is_taken(f"{folder}/taken")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.timeout(180)
def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(run_checks, WORLD_SIZE, str(tmp_path))
    curves = read(tmp_path / "one" / "tb")
    assert curves["relay/bytes_sent"] == [(1, 201.0), (2, 201.0)]
    assert curves["relay/wait_seconds"] == [(1, 1.0), (2, 1.0)]
    assert curves["validation_metrics/loss"] == [(1, 2.0), (2, 2.0)]
    assert all([step for step, _ in points] == [1, 2] for points in curves.values())
    assert len(list((tmp_path / "one" / "tb").glob("events.*"))) == 1, "one rank writes"
    for rank in range(WORLD_SIZE):
        assert set(read(tmp_path / "all" / "tb" / f"rank_{rank}")) == set(curves)
    (file,) = (tmp_path / "pipeline" / "tb").glob("events.*")
    assert file.stat().st_size > 0, "the last pipeline stage's rank writes"
