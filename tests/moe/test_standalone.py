"""``titan_relay.moe`` and ``relay_kernels`` need torch alone, and hold to the layers' order."""

import ast
import subprocess
import sys
from pathlib import Path

import relay_kernels
import titan_relay.moe

ALLOWED = {
    "titan_relay.moe": (
        "torch",
        "titan_relay.moe",
        "titan_relay.private_torch",
        "titan_relay.recompute",
        "relay_kernels",
    ),
    "relay_kernels": ("torch", "triton", "relay_kernels"),
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def test_imports_go_down_only():
    for package in (titan_relay.moe, relay_kernels):
        allowed = ALLOWED[package.__name__]
        for path in Path(package.__file__).parent.rglob("*.py"):
            for name in imported_modules(path):
                inside = any(name == root or name.startswith(root + ".") for root in allowed)
                assert inside or name.split(".")[0] in sys.stdlib_module_names, (path, name)


BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if root in ("torchtitan", "triton", "tiktoken", "datasets", "spmd_types"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import torch
from titan_relay.moe import relay_moe
x = torch.randn(5, 8, requires_grad=True)
ids = torch.tensor([[0, 1]] * 5)
w1, w2, w3 = torch.randn(2, 6, 8), torch.randn(2, 8, 6), torch.randn(2, 6, 8)
relay_moe(x, torch.rand(5, 2), ids, w1, w2, w3).sum().backward()
assert x.grad is not None
assert not any(name.startswith("torchtitan") for name in sys.modules)
"""


def test_runs_with_torch_alone():
    subprocess.run([sys.executable, "-c", BLOCKER], check=True, timeout=120)
