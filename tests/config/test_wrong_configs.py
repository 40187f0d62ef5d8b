"""Every wrong configuration is refused with exactly one line that names place, key and fix."""

import importlib.util
from pathlib import Path

import pytest

from tests.config.files import write_good
from tests.config.wrong import Wrong
from tests.config.wrong_combinations import COMBINATIONS, DATA, REQUESTS
from tests.config.wrong_degrees import DEGREES, PAIRS, PIPELINES
from tests.config.wrong_families import FAMILIES
from tests.config.wrong_inputs import COMMAND_LINES, FILES, PATHS
from tests.config.wrong_values import NAMES, VALUES
from titan_relay.config import ConfigError, load_config
from titan_relay.validate import validate

WRONG = NAMES + VALUES + FILES + COMMAND_LINES + DEGREES + PIPELINES + COMBINATIONS + DATA
WRONG += FAMILIES + PAIRS + PATHS + REQUESTS


def _load_and_validate(argv: list[str], ranks: int) -> None:
    loaded = load_config(argv)
    validate(loaded.config, ranks, loaded.origins)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name.replace(" ", "_"))
def test_refused_with_one_line(
    case: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    Path("case.toml").write_bytes(case.content())
    with pytest.raises(ConfigError) as caught:
        _load_and_validate(["--config", "case.toml", *case.argv], case.ranks)
    assert str(caught.value) == case.message.replace("{folder}", str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in WRONG}) == len(WRONG)


@pytest.mark.parametrize("key", ["enable_wandb", "enable_tensorboard"])
def test_report_without_its_package(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        _load_and_validate(["--config", "good.toml", f"--metrics.{key}"], 1)
    package = key.removeprefix("enable_")
    assert str(caught.value) == (
        f"command line: --metrics.{key} = true: the package {package} is not installed; "
        "install it, or use false"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [],
            "command line: --config is missing: name a TOML file, as in --config FILE.toml",
        ),
        (["--config"], "command line: --config: needs a value, a file"),
        (
            ["--config", "goood.toml"],
            'command line: --config = "goood.toml": no such file; did you mean good.toml?',
        ),
        (
            ["--config", "configs/good.toml"],
            'command line: --config = "configs/good.toml": no such file; there is no folder '
            "configs",
        ),
        (
            ["--config", "corpus"],
            'command line: --config = "corpus": is a folder; name a .toml file',
        ),
    ],
)
def test_config_file_that_cannot_be_found(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["a\nb\rc\u2028d\x0be", "\x00", "x" * 10_000])
def test_strange_text_stays_on_one_short_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "good.toml", "--optimizer.name", text])
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_a_base_names_the_file_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value is reported where it stands, even where another file overrides it."""
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    (tmp_path / "shared").mkdir()
    Path("shared/parent.toml").write_text('base = "../good.toml"\n[training]\nsteps = "5"\n')
    Path("case.toml").write_text('base = "shared/parent.toml"\n[training]\nsteps = 5\n')
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "case.toml"])
    assert str(caught.value) == (
        'shared/parent.toml: training.steps = "5": must be an integer of at least 1; '
        "write 5 without quotes"
    )


def test_a_circle_of_bases_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('base = "b.toml"\n')
    Path("b.toml").write_text('base = ["c.toml", "a.toml"]\n')
    Path("c.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "a.toml"])
    assert str(caught.value) == (
        'b.toml: base[1] = "a.toml": extends itself (a.toml -> b.toml -> a.toml); '
        "remove one of these bases"
    )
