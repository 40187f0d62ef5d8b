"""docs/add_a_model.md, block by block in a copy of the tree: files are made and changed, and every
command runs, as the page shows them and in its order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks

WALK = blocks(ROOT / "docs" / "add_a_model.md")
TREE = ("docs", "kernels", "scripts", "tests", "titan_relay", "train_configs")
FILES = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "train.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this tree without what was built in it."""
    for name in TREE:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def type_in(command: str, tree: Path) -> None:
    """Run a command as in a shell whose environment is that of this Python, on a CPU."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    outcome = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert outcome.returncode == 0, f"{command}\n{outcome.stdout[-6000:]}"


def test_every_block_is_a_file_or_a_command() -> None:
    """Nothing on the page is shown without being tried below."""
    assert all((block.language == "bash") != bool(block.file) for block in WALK)


def test_what_the_page_writes_is_in_the_style_of_the_house(tree: Path) -> None:
    written = [block for block in WALK if block.file]
    for block in written:
        block.write(tree)
    python = sorted({block.file for block in written if block.file.endswith(".py")})
    assert python
    type_in(f"ruff check {' '.join(python)}", tree)
    type_in(f"ruff format --check {' '.join(python)}", tree)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_adds_its_model(tree: Path) -> None:
    for block in WALK:
        walk(block, tree)


def walk(block: Block, tree: Path) -> None:
    """Do what one block says."""
    if block.file:
        block.write(tree)
        return
    for command in block.text.replace("\\\n", "").splitlines():
        type_in(command, tree)
