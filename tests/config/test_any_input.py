"""Whatever is in a file or on the command line, the user sees a `ConfigError` of one line."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.config.files import GOOD, write_good
from titan_relay.config import ConfigError, load_config
from titan_relay.config.schema import keys, sections
from titan_relay.validate import validate

_NAMES = [*keys(), *(path for path in sections() if path), "config", "base", "print-config", ""]
_WORDS = st.sampled_from(
    ["0", "-1", "1", "7", "1e3", "nan", "true", "none", '"none"', "[]", "[1]", "[[", "{", "{}"]
) | st.text(max_size=8)
_LINES = st.lists(
    st.sampled_from(GOOD.splitlines())
    | st.builds("{} = {}".format, st.sampled_from(_NAMES), _WORDS)
    | st.builds("[{}]".format, st.sampled_from(_NAMES))
    | st.text(max_size=12),
    max_size=12,
)


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        write_good(Path(folder))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _one_line_or_fine(argv: list[str], ranks: int = 4) -> None:
    message = "one line"
    try:
        loaded = load_config(argv)
        validate(loaded.config, ranks, loaded.origins)
    except ConfigError as error:
        message = str(error)
    assert len(message.splitlines()) == 1


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60))
@example(b"\xef\xbb\xbf\xef\xbb\xbf")
@example(b"a = " + b"[" * 5000)
@example(b"a = " + b"9" * 5000)
@example(b'base = "\\u0000"')
@example(b'base = ""')
def test_any_bytes(content: bytes) -> None:
    with _folder():
        Path("case.toml").write_bytes(content)
        _one_line_or_fine(["--config", "case.toml"])


@settings(max_examples=150, deadline=None)
@given(_LINES)
def test_any_lines(lines: list[str]) -> None:
    with _folder():
        Path("case.toml").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        _one_line_or_fine(["--config", "case.toml"])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(_NAMES), _WORDS, st.integers(1, 16))
def test_any_argument(name: str, word: str, ranks: int) -> None:
    with _folder():
        _one_line_or_fine(["--config", "good.toml", f"--{name}", word], ranks)
        _one_line_or_fine(["--config", "good.toml", f"--{name}={word}"], ranks)
        _one_line_or_fine(["--config", "good.toml", f"--{name}"], ranks)


_DEGREES = [path for path in keys() if path.endswith("_degree")]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_DEGREES), st.integers(1, 9)),
    st.integers(1, 24),
    st.integers(1, 512),
    st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
)
def test_any_degrees(degrees: dict[str, int], ranks: int, seq_len: int, schedule: str) -> None:
    arguments = [f"--{path}={size}" for path, size in degrees.items()]
    arguments += [f"--training.seq_len={seq_len}"]
    arguments += [f"--parallelism.pipeline_parallel_schedule={schedule}"]
    with _folder():
        _one_line_or_fine(["--config", "good.toml", *arguments], ranks)
