"""The big models have the parameters that are published for them, to the last one."""

import re
from pathlib import Path

import pytest

from tests.config.test_train_configs import MODELS, commands
from titan_relay.cli import main
from titan_relay.config import degrees_of, load_config
from titan_relay.titan.model.counts import count

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"

# Counted on transformers' own classes with the released config.json: parameters of all kinds,
# active (of the routed experts top_k / num_experts), routed, embedding, output head.
PUBLISHED = {
    "glm47_flash": (29943390976, 3896763136, 27783069696, 317194240, 317194240),
    "joyai_flash": (48942532608, 3304310784, 47110422528, 264765440, 264765440),
    "mixtral_8x7b": (46702792704, 12879925248, 45097156608, 131072000, 131072000),
    "phi35_moe": (41873153344, 6640999744, 40265318400, 131334144, 131366208),
    "qwen2_57b_a14b": (57408658944, 14249270784, 49325015040, 544538624, 544538624),
    "qwen3_30b_a3b": (30532122624, 3353032704, 28991029248, 311164928, 311164928),
    "qwen3_coder_30b_a3b": (30532122624, 3353032704, 28991029248, 311164928, 311164928),
}
# Projections and values of all heads: what attention's products over the sequence are wide.
HEADS_AND_WIDTHS = {
    "glm47_flash": 47 * 20 * (192 + 64 + 256),
    "joyai_flash": 40 * 32 * (128 + 64 + 128),
    "mixtral_8x7b": 32 * 32 * 2 * 128,
    "phi35_moe": 32 * 32 * 2 * 128,
    "qwen2_57b_a14b": 28 * 28 * 2 * 128,
    "qwen3_30b_a3b": 48 * 32 * 2 * 128,
    "qwen3_coder_30b_a3b": 48 * 32 * 2 * 128,
}
BYTES_OF_STATE = 16  # float32 parameter, gradient, and two moments


def file(name: str) -> str:
    return str(CONFIGS / f"{name}.toml")


def test_every_model_is_here() -> None:
    assert sorted(PUBLISHED) == MODELS


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_flops(name: str) -> None:
    model = load_config(["--config", file(name)]).config.model
    counts = count(model, seq_len=1000)
    found = (counts.total, counts.active, counts.routed, counts.embedding, counts.head)
    assert found == PUBLISHED[name]
    weights = counts.active - counts.embedding  # the embedding is a look-up
    assert counts.flops_per_token == 6 * weights + 6 * HEADS_AND_WIDTHS[name] * 1000


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "--config", file("qwen3_30b_a3b"), "--training.seq_len", "2048"]) == 0
    printed = capsys.readouterr().out
    for number in PUBLISHED["qwen3_30b_a3b"]:
        assert str(number) in printed
    assert "2048 tokens" in printed
    assert main(["count", "--config", file("qwen3_30b_a3b"), "--model.moe.top_k", "129"]) == 2
    assert "model.moe.top_k = 129" in capsys.readouterr().err


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_state_that_the_layouts_name(name: str) -> None:
    """The comments of a file say how many GB of state a GPU has; parameters over ranks say so."""
    text = Path(file(name)).read_text("utf-8")
    total = PUBLISHED[name][0] * BYTES_OF_STATE
    assert f"# {round(total / 1e9)} GB together" in text
    layouts = re.findall(r"^# (\d+) GPUs, (?:(\d+) GB each|state in host memory): ", text, re.M)
    assert len(layouts) == 3
    for (ranks, each), command in zip(layouts, commands(Path(file(name))), strict=True):
        assert int(ranks) == command.ranks
        run = load_config(["--config", file(name), *command.arguments[2:]]).config
        assert run.training.enable_cpu_offload == (not each)
        if each:
            degrees = degrees_of(run, command.ranks)
            assert int(each) == round(total / (degrees.dp_shard * degrees.cp) / 1e9)
            assert int(each) < 62, "an 80 GB GPU needs room for activations too"
