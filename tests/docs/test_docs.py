"""What the documentation names is there: linked files, keys, make targets, layouts."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import IDS, PAGES, ROOT, blocks, fragments, prose
from titan_relay.cli import COMMANDS
from titan_relay.config import ConfigError, load_config
from titan_relay.config.load import read_tables
from titan_relay.config.schema import keys, sections
from titan_relay.config.toml import WrittenFloat
from titan_relay.validate import validate

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OPTION = re.compile(r"--([a-z_]+(?:\.[a-z0-9_]+)+)")
DOTTED = re.compile(r"`([a-z_]+(?:\.[a-z0-9_]+)+)(?: = [^`]*)?`")
MAKE = re.compile(r"(?:^|`|&& )make((?: +[A-Z_]+=\S+)*) +([a-z][a-z-]*)", re.MULTILINE)
IMPORT = re.compile(r"^from (titan_relay[\w.]*) import ([\w, ]+)$", re.MULTILINE)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
FILE_SUFFIXES = (".json", ".jsonl", ".md", ".py", ".tiktoken", ".toml")
RANKS = re.compile(r"# (\d+) ranks")

# The model that the layouts of the quick start are for.
MODEL_OF_LAYOUTS = """
[model]
family = "qwen3_moe"
dim = 2048
num_layers = 48
num_heads = 32
num_kv_heads = 4
head_dim = 128
vocab_size = 151936
max_seq_len = 65536
rope_theta = 1e6
norm_eps = 1e-6
tie_word_embeddings = false
[model.moe]
num_experts = 128
top_k = 8
expert_dim = 768
score_func = "softmax"
route_norm = true
[data]
files = ["corpus.jsonl"]
[tokenizer]
path = "ranks.tiktoken"
add_eos = false
"""


def alternatives(fragment: str) -> list[str]:
    """A fragment, or, where it shows several ways to write one section, each of them."""
    try:
        tomllib.loads(fragment)
    except tomllib.TOMLDecodeError:
        return re.split(r"\n\n(?=\[)", fragment)
    return [fragment]


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, place = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if place:
            assert place in {anchor(each) for each in HEADING.findall(prose(target))}, link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_toml_fragments_are_of_known_keys_and_types(page: Path) -> None:
    for fragment in fragments(page, "toml"):
        for alternative in alternatives(fragment):
            tables = tomllib.loads(alternative, parse_float=WrittenFloat)
            tables.pop("base", None)
            assert tables
            read_tables(tables, page.name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_keys_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for line in text.splitlines():
        if "unknown key" in line:  # a message about a typo, quoted
            continue
        for key in OPTION.findall(line):
            assert key in keys(), f"--{key}"
    if page.name == "config.md":  # generated, and full of torchtitan's names
        return
    for name in DOTTED.findall(text):
        if name.split(".")[0] in sections() and not name.endswith(FILE_SUFFIXES):
            assert name in keys() or name in sections(), name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_exist(page: Path) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text("utf-8")))
    shell = [block.text for block in blocks(page)]
    # Outside code, "make" is an English word unless it is quoted.
    quoted = re.findall(r"`make [^`]+`", prose(page))
    for _, target in MAKE.findall("\n".join([*shell, *quoted])):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_scripts_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for name in re.findall(r"titan-relay ([a-z]+)", text):
        assert name in COMMANDS, name
    for script in re.findall(r"\bscripts/[\w/]+\.\w+", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_that_are_imported_exist(page: Path) -> None:
    code = "\n".join(block.text for block in blocks(page) if not block.file)
    for module, names in IMPORT.findall(code):
        for name in names.split(", "):
            assert hasattr(import_module(module), name), f"{module}.{name}"


def test_layouts_of_the_quick_start_are_legal(tmp_path: Path) -> None:
    checked = 0
    for fragment in fragments(ROOT / "docs" / "quickstart.md", "toml"):
        ranks = RANKS.match(fragment)
        if ranks is None:
            continue
        file = tmp_path / "layout.toml"
        file.write_text(MODEL_OF_LAYOUTS + fragment, encoding="utf-8")
        loaded = load_config(["--config", str(file)])
        validate(loaded.config, int(ranks[1]), loaded.origins, files=False)
        # The comment's number is what the degrees need: no other number will do.
        with pytest.raises(ConfigError):
            validate(loaded.config, 2 * int(ranks[1]), loaded.origins, files=False)
        checked += 1
    assert checked == 3


def test_the_first_file_of_the_quick_start_is_a_whole_run(tmp_path: Path) -> None:
    whole = next(
        each for each in fragments(ROOT / "docs" / "quickstart.md", "toml") if "[model]" in each
    )
    file = tmp_path / "my_run.toml"
    file.write_text(whole, encoding="utf-8")
    loaded = load_config(["--config", str(file)])
    validate(loaded.config, 1, loaded.origins, files=False)
