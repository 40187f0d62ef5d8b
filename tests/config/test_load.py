"""Files, their bases and the command line become one configuration, in the order of precedence."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.files import write_good
from titan_relay.config import ConfigError, RunConfig, load_config, parse_command_line, to_toml
from titan_relay.config.schema import DataConfig, MixtureEntry, keys


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)


def _load(*argv: str, file: str = "good.toml") -> RunConfig:
    return load_config(["--config", file, *argv]).config


def _write(name: str, text: str, encoding: str = "utf-8") -> None:
    Path(name).write_text(text, encoding=encoding)


def test_defaults_fill_what_is_not_given() -> None:
    config = _load()
    assert config.training.steps == 20
    assert config.training.max_norm == 1.0
    assert config.optimizer.name == "AdamW"
    assert config.model.moe.aux_loss_coeff == 0.0


def test_validation_data_has_its_own_defaults() -> None:
    config = _load("--validator.data.files", "corpus/train.jsonl")
    assert config.validator.data == DataConfig(
        files=("corpus/train.jsonl",), infinite=False, shuffle=False
    )
    assert config.data.infinite
    assert config.data.shuffle


def test_command_line_over_file_over_base_over_default() -> None:
    _write("middle.toml", 'base = "good.toml"\n[training]\nsteps = 30\nseq_len = 64\n')
    _write("top.toml", 'base = "middle.toml"\n[training]\nseq_len = 32\n')
    config = _load("--training.max_norm", "2", file="top.toml")
    assert config.training.local_batch_size == 2  # good.toml
    assert config.training.steps == 30  # middle.toml
    assert config.training.seq_len == 32  # top.toml
    assert config.training.max_norm == 2.0  # command line
    assert config.training.gc_freq == 50  # default
    assert _load("--training.seq_len", "16", file="top.toml").training.seq_len == 16


@pytest.mark.parametrize(
    "key",
    [
        "dump_folder",
        "tokenizer.path",
        "checkpoint.folder",
        "checkpoint.initial_load_path",
        "metrics.save_tb_folder",
        "comm.save_traces_folder",
        "profiler.save_traces_folder",
        "profiler.save_memory_snapshot_folder",
    ],
)
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/runs/a", "{home}/runs/a"),
        ("$RUNS/a", "/scratch/me/a"),
        ("x/${RUNS}_$N/", "x//scratch/me_7/"),
        ("s3://bucket/a/~b", "s3://bucket/a/~b"),
        ("./~a$", "./~a$"),
    ],
)
def test_home_and_variables_are_expanded_in_every_path(
    key: str, text: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_variables(tmp_path, monkeypatch)
    *sections, name = key.split(".")
    _write("path.toml", f'base = "good.toml"\n{key} = "{text}"\n')
    for config in (_load(file="path.toml"), _load(f"--{key}={text}")):
        for section in sections:
            config = getattr(config, section)
        assert getattr(config, name) == path.replace("{home}", str(tmp_path))


def test_home_and_variables_are_expanded_in_every_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_variables(tmp_path, monkeypatch)
    entry = 'name = "a"\nweight = 1\nfiles = ["~/a.jsonl"]'
    _write("7.toml", f'base = "~/good.toml"\n[[validator.data.mixture]]\n{entry}\n')
    config = _load("--data.files", "~/*.jsonl,$RUNS/[ab].jsonl", file="~/$N.toml")
    assert config.data.files == (f"{tmp_path}/*.jsonl", "/scratch/me/[ab].jsonl")
    assert config.validator.data.mixture[0].files == (f"{tmp_path}/a.jsonl",)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "")
    with pytest.raises(ConfigError, match="the variable RUNS is not set here"):
        _load("--dump_folder=$RUNS/a")


def test_the_configuration_printed_has_the_paths_that_a_run_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_variables(tmp_path, monkeypatch)
    assert 'dump_folder = "/scratch/me/a"' in to_toml(_load("--dump_folder=$RUNS/a"))


def test_every_key_that_names_files_is_a_path() -> None:
    """A new key of this kind says so, or is no path in spite of its name."""
    named = re.compile(r"(^|_|\.)(files?|folder|path)($|_)")
    no_paths = {"comm.save_traces_file_prefix"}
    for path, key in keys().items():
        assert key.rule.path or not named.search(path) or path in no_paths, path


def _set_variables(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOME", str(home)), ("RUNS", "/scratch/me"), ("N", "7")):
        monkeypatch.setenv(name, value)


def test_later_base_over_earlier() -> None:
    _write("a.toml", "[training]\nsteps = 1\nseq_len = 8\n")
    _write("b.toml", "[training]\nsteps = 2\n")
    _write("case.toml", 'base = ["good.toml", "a.toml", "b.toml"]\n')
    config = _load(file="case.toml")
    assert (config.training.steps, config.training.seq_len) == (2, 8)


def test_two_files_may_share_a_base() -> None:
    _write("a.toml", 'base = "good.toml"\n[training]\nsteps = 1\n')
    _write("b.toml", 'base = "good.toml"\n[optimizer]\nlr = 1e-4\n')
    _write("case.toml", 'base = ["a.toml", "b.toml"]\n')
    assert _load(file="case.toml").optimizer.lr == 1e-4


def test_base_is_relative_to_its_file() -> None:
    Path("sub").mkdir()
    _write("sub/case.toml", 'base = "../good.toml"\n')
    assert _load(file="sub/case.toml").training.steps == 20


def test_lists_are_replaced_and_tables_merged() -> None:
    _write("case.toml", 'base = "good.toml"\n[data]\nfiles = ["x"]\n[model.moe]\ntop_k = 2\n')
    config = _load(file="case.toml")
    assert config.data.files == ("x",)
    assert (config.model.moe.top_k, config.model.moe.num_experts) == (2, 16)


def test_none_unsets_what_a_base_sets() -> None:
    _write("a.toml", 'base = "good.toml"\n[lr_scheduler]\ntotal_steps = 100\n')
    _write("case.toml", 'base = "a.toml"\n[lr_scheduler]\ntotal_steps = "none"\n')
    assert _load(file="a.toml").lr_scheduler.total_steps == 100
    assert _load(file="case.toml").lr_scheduler.total_steps is None
    assert _load("--lr_scheduler.total_steps=none", file="a.toml").lr_scheduler.total_steps is None


def test_byte_order_mark_is_dropped() -> None:
    _write("case.toml", 'base = "good.toml"\n[training]\nsteps = 7\n', encoding="utf-8-sig")
    assert Path("case.toml").read_bytes().startswith(b"\xef\xbb\xbf")
    assert _load(file="case.toml").training.steps == 7


def test_text_beyond_ascii_survives() -> None:
    _write("case.toml", 'base = "good.toml"\ndump_folder = "Läufe/日本"\n')
    assert _load(file="case.toml").dump_folder == "Läufe/日本"


def test_integer_stands_for_a_float() -> None:
    _write("case.toml", 'base = "good.toml"\n[training]\nmax_norm = 2\n')
    norm = _load(file="case.toml").training.max_norm
    assert norm == 2.0
    assert isinstance(norm, float)


def test_mixture_tables() -> None:
    _write(
        "case.toml",
        'base = "good.toml"\n[data]\nfiles = []\n'
        '[[data.mixture]]\nname = "a"\nweight = 1\nfiles = ["corpus/train.jsonl"]\n'
        '[[data.mixture]]\nname = "b"\nweight = 0.5\ndataset = "allenai/c4"\nsubset = "en"\n',
    )
    assert _load(file="case.toml").data.mixture == (
        MixtureEntry(name="a", weight=1.0, files=("corpus/train.jsonl",)),
        MixtureEntry(name="b", weight=0.5, dataset="allenai/c4", subset="en"),
    )


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5"], "training.steps", 5),
        (["--training.steps=5", "--training.steps=6"], "training.steps", 6),
        (
            ["--parallelism.data_parallel_shard_degree", "-1"],
            "parallelism.data_parallel_shard_degree",
            -1,
        ),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "false"], "compile.enable", False),
        (["--compile.enable=true"], "compile.enable", True),
        (["--compile.enable", "--training.steps", "5"], "compile.enable", True),
        (["--compile.components", "model"], "compile.components", ("model",)),
        (["--compile.components", "model, loss"], "compile.components", ("model", "loss")),
        (["--compile.components", "['loss']"], "compile.components", ("loss",)),
        (["--data.files", ""], "data.files", ()),
        (["--data.files", "42"], "data.files", ("42",)),
        (["--dump_folder", "42"], "dump_folder", "42"),
        (["--dump_folder", "a=b,c [d]"], "dump_folder", "a=b,c [d]"),
        (["--dump_folder=--odd"], "dump_folder", "--odd"),
        (["--checkpoint.initial_load_path", "none"], "checkpoint.initial_load_path", None),
        (["--tokenizer.special_tokens", '{"<s>" = 1}'], "tokenizer.special_tokens", {"<s>": 1}),
        (["--tokenizer.special_tokens", '{"<s>": 1}'], "tokenizer.special_tokens", {"<s>": 1}),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]'],
            "parallelism.module_fqns_per_model_part",
            (("a", "b"), ("c",)),
        ),
        (
            ["--data.mixture", '[{"name": "a", "weight": 1, "files": ["x"]}]'],
            "data.mixture",
            (MixtureEntry(name="a", weight=1.0, files=("x",)),),
        ),
    ],
)
def test_spellings_on_the_command_line(argv: list[str], key: str, value: object) -> None:
    found: object = _load(*argv)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_flags() -> None:
    assert parse_command_line(["--help"]).help
    assert parse_command_line(["--config", "no.toml", "-h"]).help
    assert load_config(["--config", "good.toml", "--print-config"]).print_config
    command = parse_command_line(["--print-config", "--config", "good.toml"])
    assert command.print_config
    assert command.config_file == "good.toml"


def test_sources_name_where_a_value_came_from() -> None:
    _write("case.toml", 'base = "good.toml"\n[training]\nseq_len = 64\n')
    origins = load_config(["--config", "case.toml", "--debug.seed", "3"]).origins
    assert origins.given["training.seq_len"] == "case.toml"
    assert origins.given["training.steps"] == "good.toml"
    assert origins.given["debug.seed"] == "command line"
    assert "optimizer.lr" not in origins.given


def test_config_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _load().training.steps = 5  # type: ignore[misc]


def test_balancing_bias_is_off_where_the_auxiliary_loss_is_on() -> None:
    def effective(*argv: str) -> float:
        return _load(*argv).model.moe.effective_load_balance_coeff

    assert effective() == 1e-3
    assert effective("--model.moe.aux_loss_coeff", "0.01") == 0.0
    assert effective("--model.moe.load_balance_coeff", "0") == 0.0
    both = ("--model.moe.aux_loss_coeff=0.01", "--model.moe.load_balance_coeff=0.002")
    assert effective(*both) == 0.002


def test_nothing_heavy_is_imported_for_a_mistake() -> None:
    """A wrong configuration must be reported before torch starts, which takes seconds."""
    program = (
        "import sys; from titan_relay.config import ConfigError, load_config\n"
        "from titan_relay.validate import validate\n"
        "loaded = load_config(['--config', 'good.toml', '--model.moe.top_k', '1000'])\n"
        "try: validate(loaded.config, 1, loaded.origins)\n"
        "except ConfigError: pass\n"
        "else: raise AssertionError('1000 of so many experts are no mistake')\n"
        "heavy = {'torch', 'torchtitan', 'numpy', 'tyro', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(root)}, timeout=60
    )
