"""The training script in ``docs/relay_moe.md`` is short, runs as it stands, and learns."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "relay_moe.md"
MAX_LINES = 60


def script():
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return source


def test_the_script_is_short():
    lines = [line for line in script().splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


def test_the_script_trains_on_two_ranks(tmp_path):
    path = tmp_path / "train_relay.py"
    path.write_text(script())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc_per_node", "2", str(path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses[-1] < 0.8 * losses[0], result.stdout
