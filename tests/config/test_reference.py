"""Every key is documented, in ``--help`` and in docs/config.md, which is up to date."""

import subprocess
import sys
from pathlib import Path

from titan_relay.config.reader import default_text
from titan_relay.config.reference import help_text, reference
from titan_relay.config.schema import keys

ROOT = Path(__file__).resolve().parents[2]


def test_documentation_is_up_to_date() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m titan_relay.config.reference > docs/config.md"


def test_module_prints_the_documentation() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "titan_relay.config.reference"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        timeout=60,
    )
    assert printed.stdout.decode() == reference()


def test_help_lists_every_key_with_default_and_meaning() -> None:
    words = " ".join(help_text().split())
    for path, key in keys().items():
        assert f"--{path} (" in words
        assert f"; {default_text(key)}) {key.meaning}" in words


def test_help_fits_a_terminal() -> None:
    too_long = [line for line in help_text().splitlines() if len(line) > 100]
    assert not too_long


def test_meanings_are_short_sentences() -> None:
    for path, key in keys().items():
        assert len(key.meaning) > 10, path
        assert len(key.meaning) < 330, path
        assert key.meaning.rstrip('"').endswith("."), path
