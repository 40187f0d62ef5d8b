"""``relay_moe`` in other people's code: with torch alone, and in the script of its documentation.

The training script in ``docs/relay_moe.md`` is short, runs as it stands, learns, and leaves no
thread that would abort a rank while its interpreter ends.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.support.distributed import ROOT

DOCS = ROOT / "docs" / "relay_moe.md"
MAX_LINES = 60
BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if root in ("torchtitan", "triton", "tiktoken", "datasets", "spmd_types", "tomli_w"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import torch
from titan_relay.moe import ExpertWeights, relay_moe
x = torch.randn(5, 8, requires_grad=True)
ids = torch.tensor([[0, 1]] * 5)
w1, w2, w3 = torch.randn(2, 6, 8), torch.randn(2, 8, 6), torch.randn(2, 6, 8)
relay_moe(x, torch.rand(5, 2), ids, ExpertWeights(w1, w2, w3)).sum().backward()
assert x.grad is not None
assert not any(name.startswith("torchtitan") for name in sys.modules)
"""


def test_runs_with_torch_alone():
    subprocess.run([sys.executable, "-c", BLOCKER], check=True, timeout=120)


def script():
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return source


def test_the_script_is_short():
    lines = [line for line in script().splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


# Ahead of the script, so that what it registers itself is called first.
AT_THE_END = """
import atexit
from tests.support.distributed import gloo_threads
atexit.register(lambda: print(f"left: {gloo_threads()}\\n", end="", flush=True))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What the script prints on two ranks."""
    path = tmp_path_factory.mktemp("script") / "train_relay.py"
    path.write_text(AT_THE_END + script())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc_per_node", "2", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_script_trains_on_two_ranks(output):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.8 * losses[0], output


def test_the_script_ends_its_groups_threads(output):
    assert re.findall(r"left: (\d+)", output) == ["0", "0"], output
