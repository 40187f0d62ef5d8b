"""Imports go down only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each package may import of this project; itself is always allowed.
MAY_IMPORT = {
    "titan_relay/units.py": set(),
    "titan_relay/private_torch.py": set(),
    "titan_relay/cli.py": {"titan_relay.config", "titan_relay.commands"},
    "titan_relay/local_ranks.py": set(),
    "titan_relay/commands": {
        "titan_relay.config",
        "titan_relay.data",
        "titan_relay.local_ranks",
        "titan_relay.measure",
        "titan_relay.titan",
        "titan_relay.units",
        "titan_relay.validate",
    },
    "titan_relay/validate.py": {"titan_relay.config", "titan_relay.data", "titan_relay.titan"},
    "titan_relay/titan": {
        "titan_relay.config",
        "titan_relay.data",
        "titan_relay.local_ranks",
        "titan_relay.measure",
        "titan_relay.moe",
        "titan_relay.ops",
        "titan_relay.recompute",
        "titan_relay.private_torch",
        "titan_relay.units",
    },
    "titan_relay/data": {"titan_relay.config"},
    "titan_relay/config": {"titan_relay.units"},
    "titan_relay/moe": {
        "relay_kernels",
        "titan_relay.config",
        "titan_relay.private_torch",
        "titan_relay.recompute",
    },
    "titan_relay/ops": {"titan_relay.private_torch", "titan_relay.recompute"},
    "titan_relay/recompute": {"titan_relay.measure", "titan_relay.private_torch"},
    "titan_relay/measure": {"titan_relay.private_torch", "titan_relay.units"},
    "kernels/relay_kernels": set(),
}
# Only these may import torchtitan, and config must not even import torch.
TORCHTITAN_USERS = {"titan_relay/titan"}
TORCH_FREE = {"titan_relay/config", "titan_relay/data", "titan_relay/units.py"}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def files_of(package: str) -> list[Path]:
    path = ROOT / package
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_down_only(package: str) -> None:
    own = package.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
    files = files_of(package)
    assert files
    for file in files:
        for module in imports_of(file):
            if not within(module, "titan_relay") and not within(module, "relay_kernels"):
                continue
            allowed = {own} | MAY_IMPORT[package]
            assert any(within(module, each) for each in allowed), f"{file}: imports {module}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_only_titan_imports_torchtitan_and_config_no_torch(package: str) -> None:
    for file in files_of(package):
        for module in imports_of(file):
            if package not in TORCHTITAN_USERS:
                assert not within(module, "torchtitan"), f"{file}: imports {module}"
            if package in TORCH_FREE:
                assert not within(module, "torch"), f"{file}: imports {module}"


def test_every_package_is_listed() -> None:
    packages = {
        f"titan_relay/{path.name}"
        for path in (ROOT / "titan_relay").iterdir()
        if path.is_dir() and not path.name.startswith("__")
    }
    assert packages <= set(MAY_IMPORT)


def test_every_file_says_what_it_is_for() -> None:
    for folder in ("titan_relay", "kernels", "scripts", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            assert not text or ast.get_docstring(ast.parse(text)), file
