"""Every file in train_configs/ is a valid configuration, on the ranks that its comments name.

Comments hold whole commands, `torchrun --nproc_per_node N ... train.py --config FILE ...`; a file
without one is checked on as many ranks as its degrees multiply to. `shared/` has parts of files.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan_relay.config import ConfigError, degrees_of, load_config, to_toml
from titan_relay.validate import validate

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
MODELS = sorted(path.stem.removesuffix("_tiny") for path in CONFIGS if path.stem.endswith("_tiny"))
LAYOUTS = (8, 16, 64)


@dataclass(frozen=True)
class Command:
    """One command of a file's comments: ranks, and arguments of train.py."""

    ranks: int
    arguments: tuple[str, ...]


def commands(path: Path) -> list[Command]:
    """The commands in a file's comments; a backslash continues one on the next line."""
    comments = [
        line.lstrip("# ") for line in path.read_text("utf-8").splitlines() if line.startswith("#")
    ]
    text = "\n".join(comments).replace("\\\n", " ")
    found = []
    for line in re.findall(r"^torchrun .*$", text, re.MULTILINE):
        options, _, arguments = line.partition(" train.py ")
        given = dict(zip(*[iter(shlex.split(options)[1:])] * 2, strict=True))
        ranks = int(given.pop("--nnodes", "1")) * int(given.pop("--nproc_per_node"))
        assert not given, line
        found.append(Command(ranks, tuple(shlex.split(arguments))))
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_valid(path: Path) -> None:
    given = ["--config", str(path)]
    every = commands(path) or [Command(degrees_of(load_config(given).config, 1).world, ())]
    for command in every:
        if command.arguments:
            assert command.arguments[:2] == ("--config", path.relative_to(ROOT).as_posix())
        loaded = load_config([*given, *command.arguments[2:]])
        # Corpus and tokenizer are made by scripts, so they need not be there yet.
        validate(loaded.config, command.ranks, loaded.origins, files=False)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_a_layout_for_each_size(name: str) -> None:
    path = ROOT / "train_configs" / f"{name}.toml"
    found = commands(path)
    assert tuple(command.ranks for command in found) == LAYOUTS
    for command in found:
        loaded = load_config(["--config", str(path), *command.arguments[2:]])
        assert degrees_of(loaded.config, command.ranks).ep == 8, "a ring stays inside a machine"
        with pytest.raises(ConfigError):  # the batch does not divide by 7
            validate(loaded.config, 7, loaded.origins, files=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_printed_gives_itself(path: Path, tmp_path: Path) -> None:
    config = load_config(["--config", str(path)]).config
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(config), encoding="utf-8")
    assert load_config(["--config", str(printed)]).config == config


@pytest.mark.parametrize("name", MODELS)
def test_tiny_siblings_differ_in_numbers_only(name: str) -> None:
    """What is tried on a CPU is what a big run does: the same family, routing, losses, relay."""
    big, tiny = (
        load_config(["--config", str(ROOT / "train_configs" / f"{each}.toml")]).config
        for each in (name, f"{name}_tiny")
    )
    for section in ("relay", "attention_retention"):
        assert getattr(big, section) == getattr(tiny, section)
    assert big.model.family == tiny.model.family
    assert big.loss.name == tiny.loss.name
    for key in ("score_func", "route_norm", "route_scale", "aux_loss_coeff", "aux_loss_scope"):
        assert getattr(big.model.moe, key) == getattr(tiny.model.moe, key), key


@pytest.mark.parametrize("name", MODELS)
def test_every_choice_has_its_reason(name: str) -> None:
    """Sections that hold choices, not facts of the model, say why, key by key or for a pair."""
    text = (ROOT / "train_configs" / f"{name}.toml").read_text("utf-8")
    for section in ("relay", "training", "parallelism", "attention_retention", "optimizer"):
        body = re.search(rf"^\[{section}\]\n((?:(?!\[).*\n)*)", text, re.MULTILINE)
        if body is None:  # the same as in its base
            continue
        lines = [line for line in body[1].splitlines() if line.strip()]
        bare = [line for line in lines if "#" not in line]
        allowed = {"optimizer": {"name", "beta1", "eps"}}.get(section, set())
        assert {line.split(" =")[0] for line in bare} <= allowed, bare
