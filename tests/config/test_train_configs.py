"""Every file in train_configs/ is a valid configuration.

A file says in its comments how it is started (``--nproc_per_node N``, ``--nnodes N``); without
that, the product of its degrees is the number of ranks.
"""

import re
from pathlib import Path

import pytest

from titan_relay.config import degrees_of, load_config, to_toml, validate

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "train_configs").glob("**/*.toml"))


def _comments(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.lstrip().startswith("#"))


def _ranks(path: Path) -> int | None:
    """Ranks that the file's comments start it with."""
    per_node = re.search(r"--nproc[_-]per[_-]node[ =](\d+)", _comments(path))
    nodes = re.search(r"--nnodes[ =](\d+)", _comments(path))
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) if per_node else None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_valid(path: Path) -> None:
    loaded = load_config(["--config", str(path)])
    ranks = _ranks(path) or degrees_of(loaded.config, 1).world
    # Corpus and tokenizer are made by scripts, so they need not be there yet.
    validate(loaded.config, ranks, loaded.sources, files=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_printed_gives_itself(path: Path, tmp_path: Path) -> None:
    config = load_config(["--config", str(path)]).config
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(config), encoding="utf-8")
    assert load_config(["--config", str(printed)]).config == config
