"""Configurations that are right, though they look unusual, are accepted."""

from pathlib import Path

import pytest

from tests.config.files import write_good
from titan_relay.config import RunConfig, degrees_of, load_config
from titan_relay.validate import validate


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)


def _valid(ranks: int, *argv: str, files: bool = True) -> RunConfig:
    loaded = load_config(["--config", "good.toml", *argv])
    validate(loaded.config, ranks, loaded.origins, files=files)
    return loaded.config


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (1, {}),
        (4, {}),
        # The ring of experts then runs over the context-parallel ranks.
        (4, {"data_parallel_shard": 1, "context_parallel": 4, "expert_parallel": 4}),
        (4, {"data_parallel_shard": 2, "context_parallel": 2, "expert_parallel": 4}),
        (8, {"data_parallel_replicate": 2, "expert_parallel": 4}),
        (8, {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 8}),
        (8, {"pipeline_parallel": 2, "data_parallel_shard": 4, "expert_parallel": 2}),
        (6, {"data_parallel_shard": 3, "context_parallel": 2, "expert_parallel": 2}),
    ],
)
def test_degrees_that_fit(ranks: int, degrees: dict[str, int]) -> None:
    argv = [f"--parallelism.{name}_degree={size}" for name, size in degrees.items()]
    config = _valid(ranks, *argv)
    assert degrees_of(config, ranks).world == ranks


def test_left_over_degree() -> None:
    config = _valid(8, "--parallelism.context_parallel_degree=2")
    degrees = degrees_of(config, 8)
    assert (degrees.dp_shard, degrees.batch, degrees.expert_region) == (4, 4, 8)


@pytest.mark.parametrize(
    "argv",
    [
        ["--training.seq_len=4096"],
        ["--training.global_batch_size=16"],
        ["--lr_scheduler.total_steps=20"],
        ["--model.moe.top_k=16"],
        ["--model.num_kv_heads=4"],
        ["--loss.name=chunked_cross_entropy"],
        [
            "--relay.dispatcher=alltoall",
            "--activation_checkpoint.mode=memory_budget",
            "--compile.enable",
        ],
        ["--compile.enable", "--compile.components=loss"],
        ["--validator.enable=false", "--parallelism.pipeline_parallel_schedule=DualPipeV"],
        ["--parallelism.enable_sequence_parallel=false"],
        ["--tokenizer.pattern", r"\p{L}+|\s+|."],
        ["--tokenizer.add_eos=false", "--tokenizer.eos_token=none"],
        ["--validator.enable", "--validator.data.files=corpus/train.jsonl"],
        ["--validator.data.files=not/there.jsonl"],
        ["--data.files=", "--data.dataset=allenai/c4", "--data.subset=en"],
        ["--checkpoint.enable", "--checkpoint.initial_load_path=s3://bucket/run"],
    ],
)
def test_keys_that_go_together(argv: list[str]) -> None:
    _valid(1, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--parallelism.pipeline_parallel_schedule=GPipe"],
        ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
        ["--parallelism.pipeline_parallel_layers_per_stage=3"],
        ["--parallelism.pipeline_parallel_microbatch_size=2"],
        [
            "--parallelism.module_fqns_per_model_part",
            '[["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", '
            '"lm_head"]]',
        ],
    ],
)
def test_pipelines_that_fit(argv: list[str]) -> None:
    _valid(2, "--parallelism.pipeline_parallel_degree=2", *argv)


def test_files_are_not_looked_for_where_the_run_is_elsewhere() -> None:
    _valid(1, "--data.files=/elsewhere/*.parquet", "--tokenizer.path=/elsewhere/t", files=False)


def test_huggingface_folder() -> None:
    Path("hf").mkdir()
    Path("hf/tokenizer.json").write_text("{}")
    _valid(1, "--tokenizer.kind=huggingface", "--tokenizer.path=hf", "--tokenizer.eos_token=none")
