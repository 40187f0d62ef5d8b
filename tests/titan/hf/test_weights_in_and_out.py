"""What folders bring along and what exports may not lose: a head that is stored twice, code that is
not copied, weights that the type of an export cannot hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.distributed import run_ranks
from tests.titan.hf.cases import CASES, SEQ_LEN, Case
from tests.titan.hf.folders import QWEN3, QWEN3_TIED, contents, edit_weights, run_of, write_folder
from tests.titan.runs import a_run, config_file, layout, trainer_of, write_data
from titan_relay.cli import main
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.folder import open_folder
from titan_relay.titan.hf.from_hf import from_hf, open_checked
from titan_relay.titan.hf.to_hf import ExportOptions, to_hf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MLA = next(case for case in CASES if case.family == "mla_moe")
Weights = dict[str, torch.Tensor]


def _store_head(change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Stores the embedding's copy as a head, changed."""
    return lambda tensors: tensors.update({HEAD: change(tensors[EMBEDDING].clone())})


def _put(name: str, value: float, at: tuple[int, ...] = (-1, 0)) -> Any:
    """Sets one value of a tensor."""

    def change(tensors: Weights) -> None:
        tensors[name][at] = value

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_model_may_store_its_head_too(dtype: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", QWEN3_TIED, dtype=dtype, shard="1GB")
    before = contents(tmp_path / "hf")
    run = run_of(tmp_path / "hf")
    edit_weights(tmp_path / "hf", _store_head())
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    stored = PartsReader(tmp_path / "checkpoint")
    assert torch.equal(stored.read("lm_head.weight"), stored.read("tok_embeddings.weight"))
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    assert contents(tmp_path / "out") == before  # as transformers writes it: once


def _one_more(weight: torch.Tensor) -> torch.Tensor:
    weight[-1, -1] += 0.25
    return weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_one_more, rf"{HEAD} differs from {EMBEDDING} by up to 2\.5e-01.*in config\.json and in"),
        (lambda weight: weight * torch.nan, rf"{HEAD} differs from {EMBEDDING} by up to inf"),
        (lambda weight: weight[:-1], rf"1 unexpected \({HEAD}\)"),
    ],
    ids=["one value", "NaN", "fewer rows"],
)
def test_a_tied_model_with_another_head_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "hf", QWEN3_TIED)
    run = run_of(tmp_path / "hf")
    edit_weights(tmp_path / "hf", _store_head(change))
    with pytest.raises(HfError, match=message):
        open_checked(tmp_path / "hf", run.model)
    open_checked(tmp_path / "hf", run.model, skip="lm_head")


def test_a_head_of_its_own_that_is_missing_gets_a_hint(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    edit_weights(tmp_path / "hf", lambda tensors: tensors.pop(HEAD))
    hint = rf"1 missing \({HEAD}; if it is the embedding, set tie_word_embeddings = true in"
    with pytest.raises(HfError, match=hint):
        open_checked(tmp_path / "hf", run_of(tmp_path / "hf").model)


AUTO_MAP = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}


def _change_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


@pytest.mark.parametrize("case", [QWEN3, MLA], ids=lambda case: case.family)
def test_an_export_asks_for_no_code_that_is_not_there(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    caplog.set_level("INFO")
    write_folder(tmp_path / "hf", case)
    _change_json(tmp_path / "hf" / "config.json", auto_map=AUTO_MAP)
    (tmp_path / "hf" / "modeling_x.py").write_text("raise RuntimeError")
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    assert "config.json is left out: transformers knows the class itself" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(model.lm_head.weight, open_folder(tmp_path / "hf").read(HEAD))


@pytest.mark.parametrize(
    ("auto_map", "files", "kept"),
    [
        ({"AutoTokenizer": ["tokenization_x.X", None]}, ["tokenization_x.py"], True),
        ({"AutoTokenizer": ["tokenization_x.X", None]}, [], False),
        ({"AutoTokenizer": [None, "fast_x.X"]}, ["fast_x.py"], False),
        ({"AutoTokenizer": "someone/repository--fast_x.X"}, [], True),
    ],
    ids=["copied", "missing", "not a tokenizer's name", "of a hub"],
)
def test_a_tokenizer_s_own_code_goes_with_it_or_is_not_named(
    auto_map: dict[str, Any], files: list[str], kept: bool, tmp_path: Path
) -> None:
    write_folder(tmp_path / "hf")
    _change_json(tmp_path / "hf" / "tokenizer_config.json", auto_map=auto_map, model_max_length=7)
    for each in files:
        (tmp_path / "hf" / each).write_text("")
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out")
    expected = {"model_max_length": 7} | ({"auto_map": auto_map} if kept else {})
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == expected


EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("source", "value", "target", "message"),
    [
        ("float32", 1e5, "float16", r"w2_EDF has values up to 100000, and float16 ends at 65504; "),
        ("bfloat16", -1e5, "float16", r"w2_EDF has values up to 99840, and float16"),
        ("float32", 65520.0, "float16", r"w2_EDF has values up to 65520"),  # rounds to infinity
        ("float32", -LARGEST_FLOAT32, "bfloat16", r"up to 3\.40282e\+38, and bfloat16 ends at 3\."),
        ("float32", 65519.0, "float16", None),  # rounds to the largest
        ("float32", 1e5, "bfloat16", None),
        ("bfloat16", 1e38, "float32", None),
    ],
)
def test_an_export_that_would_write_infinity_is_refused(
    source: str, value: float, target: str, message: str | None, tmp_path: Path
) -> None:
    write_folder(tmp_path / "hf", dtype=source)
    edit_weights(tmp_path / "hf", _put(EXPERT, value))
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    options = ExportOptions(dtype=getattr(torch, target))
    imported = tmp_path / "imported"
    if message is None:
        to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out", options)
        from_hf(tmp_path / "hf", run.model, imported, dtype=options.dtype)
        written = load_file(tmp_path / "out" / "model.safetensors")[EXPERT]
        assert written.isfinite().all()
        return
    with pytest.raises(HfError, match=message):
        to_hf(tmp_path / "checkpoint", run.model, tmp_path / "out", options)
    with pytest.raises(HfError, match=re.escape(EXPERT)):
        from_hf(tmp_path / "hf", run.model, imported, dtype=options.dtype)
    assert not (tmp_path / "out").exists()
    assert not imported.exists()


def test_the_command_refuses_an_overflow_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "hf")
    edit_weights(tmp_path / "hf", _put(EMBEDDING, 1e5))
    run_of(tmp_path / "hf")
    common = ["--config", str(tmp_path / "hf.toml"), "--dtype", "float16"]
    folders = ["--hf-dir", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]
    capsys.readouterr()  # what transformers said
    assert main(["convert", "from-hf", *common, *folders]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {EMBEDDING} has values up to 100000, and float16 ends at")
    assert error.endswith("choose a wider --dtype, such as float32\n")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_values_that_are_infinite_already_are_said_and_do_not_hide_an_overflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path / "hf")
    edit_weights(tmp_path / "hf", _put(EXPERT, torch.nan))
    edit_weights(tmp_path / "hf", _put(EMBEDDING, torch.inf))
    run = run_of(tmp_path / "hf")
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    assert "2 tensors (model.embed_tokens.weight, ...) have infinite values or NaN" in caplog.text
    edit_weights(tmp_path / "hf", _put(EXPERT, 1e5, (0, 1)))
    with pytest.raises(HfError, match="has values up to 100000"):
        from_hf(tmp_path / "hf", run.model, tmp_path / "half", dtype=torch.float16)


def ranks_main(folder: str, models: dict[str, Any], dtypes: dict[str, str]) -> dict[str, str]:
    """On each of two ranks: two steps from each folder to an export; what refused it, by name."""
    torch.set_num_threads(1)
    refused = {}
    for name, model in models.items():
        run = a_run(
            name,
            **layout(dp=2, ep=2),
            **{f"model__{key.replace('.', '__')}": value for key, value in model.items()},
            training__steps=2,
            training__seq_len=SEQ_LEN,
            checkpoint__enable=True,
            checkpoint__initial_load_path=f"{folder}/{name}/hf",
            checkpoint__initial_load_in_hf=True,
            checkpoint__last_save_in_hf=True,
            checkpoint__export_dtype=dtypes.get(name, "float32"),
        )
        trainer = trainer_of(Path(folder), run)
        try:
            trainer.train()
        except HfError as error:
            refused[name] = str(error)
        trainer.close()
    return refused


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The folder of the runs, and what refused their exports on each rank."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    config_file(folder)
    cases = {"tied": (QWEN3_TIED, _store_head()), "overflow": (QWEN3, _put(EMBEDDING, 1e5))}
    cases["tied mla"] = (MLA, _store_head())
    models = {}
    for name, (case, change) in cases.items():
        tied = name.startswith("tied")
        write_folder(folder / name / "hf", case, tie_word_embeddings=tied)
        edit_weights(folder / name / "hf", change)
        models[name] = case.model | {"tie_word_embeddings": tied}
        open_checked(folder / name / "hf", run_of(folder / name / "hf").model)
    by_rank = run_ranks(ranks_main, 2, str(folder), models, {"overflow": "float16"}, timeout_s=300)
    return folder, by_rank


@pytest.mark.parametrize("name", ["tied", "tied mla"])
def test_a_run_from_a_tied_folder_that_stores_its_head_exports_it_once(
    name: str, trained: tuple[Path, list[dict[str, str]]]
) -> None:
    from transformers import AutoModelForCausalLM

    folder, refused = trained
    assert name not in refused[0]
    exported = folder / name / "checkpoint" / "step-2"
    places = open_folder(exported)
    assert HEAD not in places.places
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(model.lm_head.weight, places.read(EMBEDDING))
    start = open_folder(folder / name / "hf").read(EMBEDDING)
    moved = (places.read(EMBEDDING) - start).abs().max()
    assert 0 < moved < 0.05  # two steps from the folder's weights, not from others


def test_a_run_whose_export_overflows_keeps_everything_and_says_where(
    trained: tuple[Path, list[dict[str, str]]],
) -> None:
    folder, refused = trained
    assert refused[0] == refused[1]
    message = refused[0]["overflow"]
    saved = folder / "overflow" / "checkpoint" / "step-2"
    values = r"tok_embeddings\.weight has values up to 99\d\d\d"  # two steps of decay
    assert re.match(rf'checkpoint\.export_dtype = "float16": {values}, and float16 ends', message)
    assert f"{saved} holds the weights" in message
    assert "\n" not in message
    stored = PartsReader(saved)
    assert stored.read("tok_embeddings.weight").abs().max() == pytest.approx(1e5, rel=1e-3)
    assert any(name.startswith("optimizer.") for name in stored.tensors)
    run = run_of(folder / "overflow" / "hf")
    to_hf(saved, run.model, folder / "later", ExportOptions(dtype=torch.bfloat16))
    assert open_folder(folder / "later").read(EMBEDDING).isfinite().all()
