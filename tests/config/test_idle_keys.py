"""Keys that nothing reads: named where the command line gives them, silent in a file."""

from pathlib import Path

import pytest

from tests.config.files import write_good
from titan_relay.config import load_config
from titan_relay.config.check import remarks
from titan_relay.config.schema import keys


def _remarks(folder: Path, toml: str, *argv: str) -> list[str]:
    write_good(folder)
    path = folder / "case.toml"
    path.write_text(f'base = "good.toml"\n[lr_scheduler]\nwarmup_steps = 20\n{toml}\n')
    loaded = load_config(["--config", str(path), *argv])
    return list(remarks(loaded.config, loaded.origins))


@pytest.mark.parametrize(
    ("argv", "needs"),
    [
        ("--checkpoint.interval=5", "checkpoint.enable = true"),
        ("--checkpoint.load_step=-1", "checkpoint.enable = true"),
        ("--validator.freq=3", "validator.enable = true"),
        ("--validator.data.files=a.jsonl", "validator.enable = true"),
        ("--compile.backend=eager", "compile.enable = true"),
        ("--profiler.profile_freq=5", "profiler.enable_profiling = true or "
         "profiler.enable_memory_snapshot = true"),
        ("--profiler.memory_snapshot_freq=5", "profiler.enable_memory_snapshot = true"),
        ("--metrics.save_tb_folder=x", "metrics.enable_tensorboard = true"),
        ("--parallelism.pipeline_parallel_schedule=GPipe",
         "parallelism.pipeline_parallel_degree > 1"),
        ("--parallelism.context_parallel_load_balancer=ptrr",
         "parallelism.context_parallel_degree > 1"),
        ("--activation_checkpoint.memory_budget=0.3", 'relay.dispatcher = "alltoall"'),
        ("--model.moe.aux_loss_scope=batch", "model.moe.aux_loss_coeff > 0"),
        ("--data.split=test", "data.dataset"),
    ],
)  # fmt: skip
def test_an_idle_key_of_the_command_line_is_named(tmp_path: Path, argv: str, needs: str) -> None:
    option = argv.partition("=")[0]
    assert _remarks(tmp_path, "", argv) == [f"Without effect here: {option} (needs {needs})"]


def test_several_are_one_line(tmp_path: Path) -> None:
    (line,) = _remarks(tmp_path, "", "--validator.steps=2", "--compile.backend=eager")
    assert line == (
        "Without effect here: --compile.backend (needs compile.enable = true), "
        "--validator.steps (needs validator.enable = true)"
    )


@pytest.mark.parametrize(
    ("toml", "argv"),
    [
        ("[checkpoint]\ninterval = 5\n[validator]\nfreq = 3\n[compile]\nbackend = 'eager'", ()),
        ("[checkpoint]\nenable = true", ("--checkpoint.interval=5", "--checkpoint.load_step=3")),
        ("", ("--validator.enable", "--validator.data.files=a.jsonl", "--validator.freq=3")),
        ("", ("--validator.enable=false", "--checkpoint.enable=false", "--compile.enable=false")),
        ("", ("--profiler.enable_memory_snapshot", "--profiler.profile_freq=5")),
        ("[parallelism]\npipeline_parallel_degree = 2",
         ("--parallelism.pipeline_parallel_schedule=GPipe",)),
    ],
)  # fmt: skip
def test_what_is_read_or_written_in_a_file_is_not_named(
    tmp_path: Path, toml: str, argv: tuple[str, ...]
) -> None:
    assert _remarks(tmp_path, toml, *argv) == []


def test_a_warm_up_longer_than_the_schedule_is_said(tmp_path: Path) -> None:
    (line,) = _remarks(tmp_path, "", "--training.steps=6", "--lr_scheduler.warmup_steps=50")
    assert line.startswith(
        "lr_scheduler.warmup_steps = 50 is more than the 6 steps of the schedule"
    )
    assert "lr_scheduler.total_steps" in line


@pytest.mark.parametrize(
    "argv", ["--lr_scheduler.warmup_steps=20", "--lr_scheduler.total_steps=40"]
)
def test_a_warm_up_within_the_schedule_is_not(tmp_path: Path, argv: str) -> None:
    assert _remarks(tmp_path, "", argv) == []


def test_conditions_are_about_keys_that_are_there() -> None:
    for key in keys().values():
        for condition in (each for group in key.needs for each in group):
            assert condition.partition(" ")[0] in keys(), f"{key.path}: {condition}"


def test_a_switch_of_a_section_covers_all_its_keys() -> None:
    """Whoever adds a key to such a section gets this without a word."""
    switched = [path.removesuffix(".enable") for path in keys() if path.endswith(".enable")]
    assert switched == ["compile", "checkpoint", "validator"]
    for section in switched:
        for path, key in keys().items():
            if path.startswith(f"{section}.") and path != f"{section}.enable":
                assert (f"{section}.enable",) in key.needs, path
