"""The command line as a user meets it: one line, the right exit code, no traceback."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT, run_cli
from tests.titan.runs import config_file, write_data
from titan_relay.cli import COMMANDS, main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_data(folder)
    config_file(folder)
    return folder


def test_the_commands_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == listed
    for name, meaning in COMMANDS.items():
        assert re.search(f"^  {name} +{re.escape(meaning)}$", listed, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_needs_no_torch(command: str) -> None:
    program = (
        "import sys; from titan_relay.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code or ('torch' in sys.modules and 'torch was imported'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"  titan-relay {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pln"], "titan-relay pln: no such command; did you mean titan-relay plan?"),
        (["--config", "x.toml"], "no such command; did you mean titan-relay train --config?"),
        (["zzz"], f"known: {', '.join(COMMANDS)}"),
        (["count"], "titan-relay count: --config is missing"),
        (["train"], "command line: --config is missing"),
        (["convert", "frm-hf"], "frm-hf: no such action; did you mean from-hf?"),
        (
            ["convert", "config", "--hf-dir", "x", "--config", "y"],
            "titan-relay convert config: --config: no such option; titan-relay train, ",
        ),
        (
            ["compare", "--hf-dir", "x", "--config", "y", "--ep", "2", "--cp", "3"],
            "--cp 3: must divide --ep 2, or be a multiple of it",
        ),
        (
            ["compare", "--hf-dir", "x", "--config", "y", "--ep", "0"],
            "--ep 0: must be a whole number",
        ),
        (["compare", "--seed", "9" * 30], "--seed 999999999999999999999999999999: must be at most"),
        (["compare", "--dispatcher", "x"], "--dispatcher x: must be relay or alltoall"),
        (["convert", "to-hf", "--shard-gb", "1e300"], "--shard-gb 1e300: must be at most"),
        (["convert", "to-hf", "--out", __file__], "is a file; name a folder"),
        (["corpus", "--oot", "x"], "--oot: no such option; did you mean --out?"),
        (["corpus", "--training.steps", "3"], "--training.steps: not an option; the options are"),
        (
            ["count", "--json"],
            "--json: no such option; titan-relay plan or titan-relay longest has",
        ),
        (["train", "--skip", "x"], "--skip: no such option; titan-relay convert has it"),
        (["train", "--jsno"], "--jsno: no such option; titan-relay train --help lists"),
        (["help", "pln"], "titan-relay pln: no such command"),
        (["corpus", "--validation-share", "2"], "--validation-share 2: must be below 1"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


READS_A_RUN = {
    "train": [],
    "plan": ["--world-size", "2", "--device", "cpu"],
    "longest": ["--world-size", "2", "--device", "1"],
    "count": [],
    "compare": ["--hf-dir", "x"],
    "convert": ["--hf-dir", "x"],
}


@pytest.mark.parametrize("command", READS_A_RUN)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--config", "a.toml", "--config", "b.toml"], "a.toml is given too; name one"),
        (["--config", ""], "--config"),
        (["--config", "a.toml", "--confg", "b.toml"], "--confg: no such option; did you mean"),
        (["--config", "a.toml", "--max-bytes", "3"], "titan-relay corpus has it"),
    ],
)
def test_commands_that_read_a_run_refuse_alike(
    capsys: pytest.CaptureFixture[str], command: str, wrong: list[str], words: str
) -> None:
    action = ["check"] if command == "convert" else []
    assert main([command, *action, *READS_A_RUN[command], *wrong]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("switch", ["--plan", "--print-config"])
@pytest.mark.parametrize("command", [name for name in READS_A_RUN if name != "train"])
def test_what_only_train_can_be_asked_is_not_ignored(
    capsys: pytest.CaptureFixture[str], command: str, switch: str
) -> None:
    action = ["check"] if command == "convert" else []
    assert main([command, *action, "--config", "a.toml", *READS_A_RUN[command], switch]) == 2
    assert f"{switch}: no such option; titan-relay train has it" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["config", "check", "from-hf", "to-hf"])
def test_actions_have_an_example(capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert main(["help", "convert", action]) == 0
    assert f"\n    titan-relay convert {action} --" in capsys.readouterr().out


def test_compare_says_at_once_what_brings_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert main(["compare", "--hf-dir", "x", "--config", "y"]) == 2
    assert "pip install 'titan-relay[compare]'" in capsys.readouterr().err


def test_versions_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"titan-relay \S+ \(torch \S+, torchtitan \S+, triton .+\)\n", said)


def in_a_shell(line: str, *, code: int) -> str:
    """What a line of bash, in which `$R` is titan-relay, says on standard error."""
    environment = {**os.environ, "R": f"{sys.executable} -m titan_relay"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_reader_that_goes_ends_the_command_in_silence() -> None:
    for arguments in ("train --help", "count --help", "help"):
        line = f"(sleep 0.2; $R {arguments}) | true; exit ${{PIPESTATUS[0]}}"
        assert in_a_shell(line, code=141) == ""


def test_output_without_room_is_one_line() -> None:
    for arguments in ("train --help", "count --help", "help"):
        said = in_a_shell(f"$R {arguments} > /dev/full", code=1)
        assert said == "error: No space left on device\n"


def test_closed_streams_do_no_harm() -> None:
    assert in_a_shell("$R plan --help >&- 2>&- <&-", code=0) == ""


def test_help_lists_every_section() -> None:
    command = [sys.executable, "train.py", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "--training.steps" in result.stdout
    assert "--relay.dispatcher" in result.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_config_is_one_line_on_rank_0_and_code_2_on_all(folder: Path, rank: int) -> None:
    result = run_cli(
        "--config", f"{folder}/run.toml", "--training.stepz", "5", rank=rank, world_size=2
    )
    assert result.returncode == 2
    assert result.stdout == ""
    if rank == 0:
        assert result.stderr.count("\n") == 1
        assert "training.steps" in result.stderr
    else:
        assert result.stderr == ""


def test_print_config_is_accepted_back(folder: Path, tmp_path: Path) -> None:
    first = run_cli("--config", f"{folder}/run.toml", "--training.steps", "7", "--print-config")
    assert first.returncode == 0
    (tmp_path / "again.toml").write_text(first.stdout)
    second = run_cli("--config", f"{tmp_path}/again.toml", "--print-config")
    assert second.stdout == first.stdout
    assert "steps = 7" in first.stdout


def test_one_process_trains_without_torchrun_then_reports_instead_of_training(
    folder: Path, tmp_path: Path
) -> None:
    arguments = ["--config", f"{folder}/run.toml", "--dump_folder", f"{tmp_path}/out"]
    arguments += ["--training.steps", "2", "--checkpoint.enable", "true"]
    arguments += ["--checkpoint.last_save_model_only", "false", "--training.local_batch_size", "8"]
    arguments += ["--validator.freq", "3", "--lr_scheduler.warmup_steps", "50"]
    first = run_cli(*arguments)
    assert first.returncode == 0, first.stderr
    said = first.stderr + first.stdout
    assert said.count("Without effect here: --validator.freq (needs validator.") == 1
    assert said.count("more than the 40 steps of the schedule") == 1
    assert "Warmup steps" not in said  # torchtitan's own words
    assert "step: 2/2" in said
    second = run_cli(*arguments)
    assert second.returncode == 0, second.stderr
    assert "Nothing to train" in second.stderr + second.stdout
    assert "step: " not in second.stderr + second.stdout


def test_a_vocabulary_larger_than_the_embedding_is_refused(folder: Path) -> None:
    arguments = ["--config", f"{folder}/run.toml", "--training.local_batch_size", "8"]
    arguments += ["--tokenizer.special_tokens", "{}", "--tokenizer.eos_token", "none"]
    arguments += ["--tokenizer.add_eos", "false"]
    result = run_cli(*arguments, "--model.vocab_size", "255")
    assert result.returncode == 2
    assert "model.vocab_size = 255" in result.stderr
    assert "has 256 tokens" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run that has checkpoints of steps 1 and 2."""
    out = tmp_path_factory.mktemp("trained") / "out"
    arguments = ["--config", f"{folder}/run.toml", "--dump_folder", str(out)]
    arguments += ["--checkpoint.enable", "true", "--checkpoint.last_save_model_only", "false"]
    arguments += ["--checkpoint.interval", "1", "--training.local_batch_size", "4"]
    result = run_cli(*arguments, "--training.steps", "2")
    assert result.returncode == 0, result.stderr
    return [*arguments, "--training.steps", "3"]


@pytest.mark.parametrize(
    ("changed", "value", "saved"),
    [
        ("training.global_batch_size", "16", "was 8"),
        ("model.vocab_size", "300", "was 257"),
        ("model.num_layers", "3", "was 2"),
        ("model.moe.expert_dim", "32", "was 24"),
        ("model.moe.load_balance_coeff", "0.1", "has no balancing biases"),
        ("checkpoint.load_step", "7", "there: 1, 2"),
        ("checkpoint.load_step", "0", "there: 1, 2"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(
    trained: list[str], changed: str, value: str, saved: str
) -> None:
    result = run_cli(*trained, f"--{changed}", value)
    assert result.returncode == 2
    assert f"{changed} = {value}" in result.stderr
    assert saved in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("damage", ["shard cut short", "shard missing", "garbage in .metadata"])
def test_a_damaged_checkpoint_that_is_asked_for_is_one_line_naming_a_whole_one(
    trained: list[str], tmp_path: Path, damage: str
) -> None:
    out = Path(trained[trained.index("--dump_folder") + 1])
    shutil.copytree(out, tmp_path / "out")
    newest = tmp_path / "out" / "checkpoint" / "step-2"
    (shard,) = newest.glob("*.distcp")
    if damage == "shard missing":
        shard.unlink()
    elif damage == "shard cut short":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        (newest / ".metadata").write_bytes(b"xyz")
    result = run_cli(*trained, "--dump_folder", f"{tmp_path}/out", "--checkpoint.load_step", "2")
    assert result.returncode == 2
    assert "is damaged" in result.stderr
    assert "step 1 with checkpoint.load_step" in result.stderr
    assert ("if nodes had a folder each" in result.stderr) == (damage == "shard missing")
    assert "Traceback" not in result.stderr


def test_an_unusable_dump_folder_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--config", f"{folder}/run.toml", "--training.local_batch_size", "8"]
    result = run_cli(*arguments, "--dump_folder", f"{tmp_path}/file")
    assert result.returncode == 2
    assert "dump_folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_data_is_one_line_without_traceback(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 5)
    result = run_cli(
        *("--config", f"{folder}/run.toml", "--dump_folder", f"{tmp_path}/out"),
        *("--data.files", f"{tmp_path}/empty.jsonl", "--training.local_batch_size", "8"),
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "empty.jsonl" in result.stderr
