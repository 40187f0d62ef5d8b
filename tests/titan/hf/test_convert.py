"""Hugging Face folders to checkpoints and back: the same bytes, also after a kill, and one clear
line for every folder that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.titan.hf.cases import CASES, VOCAB_SIZE, Case
from tests.titan.hf.folders import QWEN3_TIED, contents, edit_weights, run_of, write_folder
from titan_relay.cli import main
from titan_relay.config import RunConfig
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.export import exported_config
from titan_relay.titan.hf.from_hf import from_hf, open_checked
from titan_relay.titan.hf.safetensors_file import DTYPES, FileLayout, read_places, read_tensor
from titan_relay.titan.hf.to_hf import ExportOptions, to_hf


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    """A folder of several files with tokenizer files, and its run."""
    folder = tmp_path_factory.mktemp("written") / "hf"
    write_folder(folder, dtype="bfloat16")
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "tokenizer_config.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder, run_of(folder)


@pytest.fixture
def source(written: tuple[Path, RunConfig], tmp_path: Path) -> tuple[Path, RunConfig]:
    """A copy that a test may damage."""
    shutil.copytree(written[0], tmp_path / "hf")
    return tmp_path / "hf", written[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.name}")
def test_a_round_trip_gives_the_same_files(case: Case, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", case, dtype="bfloat16")
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")


def test_one_file_and_tied_embeddings_too(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", QWEN3_TIED, shard="1GB")
    run = run_of(tmp_path / "hf")
    assert [*tmp_path.glob("hf/*.safetensors")] == [tmp_path / "hf" / "model.safetensors"]
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    stored = PartsReader(tmp_path / "checkpoint")
    assert torch.equal(stored.read("lm_head.weight"), stored.read("tok_embeddings.weight"))
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.name}")
def test_an_export_with_a_config_made_from_toml_computes_the_same(
    case: Case, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = write_folder(tmp_path / "hf", case)
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint" / "hf")
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(VOCAB_SIZE, (2, 9), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected, found = (each(input_ids=tokens).logits for each in (source, model))
    # The same weights and class, with other kernels for attention and experts; GLM's shape comes
    # back as DeepSeek's class.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


class Killed(BaseException):
    """Stands in for the end of the process."""


def killed_after(num_items: int) -> Callable[[str], None]:
    """Ends a conversion once so many items are done."""
    done = []

    def count(name: str) -> None:
        done.append(name)
        if len(done) == num_items:
            raise Killed

    return count


def test_a_killed_import_goes_on(source: tuple[Path, RunConfig], tmp_path: Path) -> None:
    folder, run = source
    every: list[str] = []
    from_hf(folder, run.model, tmp_path / "whole", part_bytes=20_000, on_done=every.append)
    killed = tmp_path / "killed"
    with pytest.raises(Killed):
        from_hf(folder, run.model, killed, part_bytes=20_000, on_done=killed_after(4))
    # A torn last line, as of a process that was killed while it wrote it.
    with (killed / ".conversion.jsonl").open("a") as journal:
        journal.write('{"item": "4", "va')
    with pytest.raises(HfError, match="is no complete checkpoint"):
        PartsReader(killed)
    left: list[str] = []
    from_hf(folder, run.model, killed, part_bytes=20_000, on_done=left.append)
    assert left == every[4:]
    assert left
    assert not (killed / ".conversion.jsonl").exists()
    one, other = PartsReader(tmp_path / "whole"), PartsReader(killed)
    assert one.tensors == other.tensors
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)


def test_a_killed_export_goes_on(source: tuple[Path, RunConfig], tmp_path: Path) -> None:
    folder, run = source
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    from_hf(folder, run.model, checkpoint)
    every: list[str] = []
    to_hf(checkpoint, run.model, tmp_path / "whole", on_done=every.append)
    with pytest.raises(Killed):
        to_hf(checkpoint, run.model, out, on_done=killed_after(5))
    assert not list(out.glob("*.safetensors"))  # nothing that looks finished
    left: list[str] = []
    to_hf(checkpoint, run.model, out, on_done=left.append)
    assert left == every[5:]
    assert left
    assert contents(out) == contents(folder)


def test_an_unfinished_conversion_of_something_else_is_refused(
    source: tuple[Path, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = source
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".conversion.jsonl").write_text('{"work": 1}\n{"item": "0", "value": ""}\n')
    with pytest.raises(HfError, match="unfinished conversion of something else"):
        from_hf(folder, run.model, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(HfError, match="full is not empty; name another folder"):
        from_hf(folder, run.model, tmp_path / "full")


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _replace(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({name: value})


EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(EXPERT), rf"1 missing \({EXPERT}\)"),
        (_replace("model.layers.2.norm.weight", torch.ones(1)), r"1 unexpected \(model.layers.2"),
        (
            _replace(EXPERT, torch.ones(20, 48)),
            rf"1 of another shape \({EXPERT}: \[20, 48\], the model's is \[48, 20\]\)",
        ),
        (
            _replace(EXPERT, torch.ones(48, 20, dtype=torch.int8)),
            r"1 of no floating-point type",
        ),
    ],
    ids=["missing", "unexpected", "shape", "quantised"],
)
def test_tensors_that_do_not_fit_are_named(
    change: Any, message: str, source: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    folder, run = source
    edit_weights(folder, change)
    with pytest.raises(HfError, match=message):
        from_hf(folder, run.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_folders_are_one_line(source: tuple[Path, RunConfig], tmp_path: Path) -> None:
    folder, run = source
    files = sorted(folder.glob("*.safetensors"))
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-7])
    with pytest.raises(HfError, match=f"{files[1].name} is cut short: .*copy it again"):
        open_checked(folder, run.model)
    files[1].write_bytes(b"garbage!" * 4)
    with pytest.raises(HfError, match=f"{files[1].name} is no safetensors file"):
        open_checked(folder, run.model)
    files[1].unlink()
    with pytest.raises(HfError, match=f"has no {files[1].name}, which .* names"):
        open_checked(folder, run.model)
    (folder / "config.json").write_text("{")
    with pytest.raises(HfError, match=r"config.json is not valid JSON"):
        open_checked(folder, run.model)


def test_layers_for_further_tokens_and_skipped_tensors_are_left_out(
    source: tuple[Path, RunConfig],
) -> None:
    folder, run = source
    edit_weights(folder, _replace("model.layers.2.eh_proj.weight", torch.ones(3)))
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(HfError, match="1 unexpected"):
        open_checked(folder, run.model)
    open_checked(folder, run.model, skip="eh_proj")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    open_checked(folder, run.model)
    with pytest.raises(HfError, match="is no regular expression"):
        open_checked(folder, run.model, skip="(")


def test_another_dtype_and_other_file_sizes(source: tuple[Path, RunConfig], tmp_path: Path) -> None:
    folder, run = source
    from_hf(folder, run.model, tmp_path / "checkpoint", dtype=torch.float32)
    shutil.rmtree(tmp_path / "checkpoint" / "hf")
    tokenizer = [folder / "tokenizer.json"]
    options = ExportOptions(dtype=torch.bfloat16, tokenizer=tokenizer, shard_bytes=60_000)
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out", options)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    assert [each.name for each in files] == names
    assert len(files) > 2
    assert all(each.stat().st_size < 60_000 + 4096 for each in files)  # and a header
    ours, theirs = ({}, {})
    for target, where in ((ours, tmp_path / "out"), (theirs, folder)):
        for each in where.glob("*.safetensors"):
            target |= load_file(each)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_bias_on_the_choice_of_experts_keeps_its_dtype(tmp_path: Path) -> None:
    """Balancing moves it by less than bfloat16 can tell apart."""
    case = next(case for case in CASES if case.family == "mla_moe")
    write_folder(tmp_path / "hf", case)
    run, narrow = run_of(tmp_path / "hf"), torch.bfloat16
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint", dtype=narrow)
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out", ExportOptions(dtype=narrow))
    ours, theirs = ({}, {})
    for target, where in ((ours, tmp_path / "out"), (theirs, tmp_path / "hf")):
        for each in where.glob("*.safetensors"):
            target |= load_file(each)
    biases = {name for name in theirs if name.endswith("e_score_correction_bias")}
    assert biases
    for name, value in theirs.items():
        assert ours[name].equal(value if name in biases else value.to(narrow)), name


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])  # as files say it now, and said it
def test_a_copied_configuration_names_the_dtype_that_is_written(
    key: str, source: tuple[Path, RunConfig]
) -> None:
    folder, run = source
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    (folder / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
    assert exported_config(run.model, folder, torch.float32) == {**config, key: "float32"}


def test_a_checkpoint_of_another_model_is_refused(
    source: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    folder, run = source
    from_hf(folder, run.model, tmp_path / "checkpoint")
    larger = run_of(folder, "--model.num_layers", "3").model
    with pytest.raises(HfError, match=r"does not have the model's tensors: 12 missing \(layers.2"):
        to_hf(tmp_path / "checkpoint", larger, tmp_path / "out")
    (tmp_path / "checkpoint" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(HfError, match=r"is damaged: __0_0\.distcp is cut short"):
        to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")


def test_safetensors_files_are_those_of_the_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"{name}.{chr(0xE9)}": torch.randint(0, 2, (3, 1 + index)).to(dtype)
        for index, (name, dtype) in enumerate(DTYPES.items())
    }
    tensors["scalar"], tensors["empty"] = torch.tensor(3.5), torch.ones(0, 4)
    layout = FileLayout((name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
    file = tmp_path / "file.safetensors"
    layout.create(file)
    for name in reversed(list(tensors)):
        layout.write(file, name, tensors[name])
    assert file.read_bytes() == save(tensors, metadata={"format": "pt"})
    places = read_places(file)
    assert places.keys() == tensors.keys()
    for name, each in tensors.items():
        read = read_tensor(file, places[name])
        assert read.dtype == each.dtype
        assert torch.equal(read.float(), each.float()), name


def test_the_command_line_checks_converts_and_speaks_in_one_line(
    source: tuple[Path, RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = source
    config = str(written_config(folder, tmp_path))

    def call(*arguments: str) -> int:
        return main(["convert", *arguments, "--config", config])

    assert call("check", "--hf-dir", str(folder)) == 0
    assert call("from-hf", "--hf-dir", str(folder), "--out", str(tmp_path / "checkpoint")) == 0
    assert "peak memory" in capsys.readouterr().out
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoint")]
    assert call("to-hf", *checkpoint, "--out", str(tmp_path / "out")) == 0
    assert contents(tmp_path / "out") == contents(folder)
    capsys.readouterr()
    assert call("check", "--hf-dir", str(folder), "--model.moe.top_k", "2") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model.moe.top_k = 2: ")
    assert "num_experts_per_tok = 3" in error
    assert error.count("\n") == 1
    assert call("to-hf", *checkpoint, "--out", str(folder)) == 2
    assert "is not empty" in capsys.readouterr().err
    nowhere = ("--out", str(tmp_path / "new"), "--assets", str(tmp_path / "nope"))
    assert call("to-hf", *checkpoint, *nowhere) == 2
    assert not (tmp_path / "new").exists()


def written_config(folder: Path, tmp_path: Path) -> Path:
    """What `titan-relay convert config` prints, as a file."""
    file = tmp_path / "run.toml"
    with file.open("w") as out, redirect_stdout(out):
        assert main(["convert", "config", "--hf-dir", str(folder)]) == 0
    return file
