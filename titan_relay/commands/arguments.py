"""What the command lines of `titan-relay` and of scripts share: the parser, and kinds of values."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from titan_relay.config import ConfigError

_PICTURES = (".svg", ".png", ".pdf")

if TYPE_CHECKING:
    from titan_relay.measure.devices import Device

N = TypeVar("N", int, float)


class CommandParser(argparse.ArgumentParser):
    """A command's options; a mistake in them is a `ConfigError` of one line, without a usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def command_parser(name: str, text: str | None) -> CommandParser:
    """The parser of `titan-relay NAME`; `text`, its module's docstring, is the help's."""
    return CommandParser(prog=f"titan-relay {name}", description=text)


def script_parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """The parser of a script; `text`, its docstring, is the help's."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def add_run_options(parser: argparse.ArgumentParser, *, device_needed: bool) -> None:
    """Options of commands that ask about a run on ranks that need not be there."""
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--world-size", type=at_least_1, required=True, help="ranks of the run")
    names = "such as h100-80g, a number of GiB, or cpu"
    parser.add_argument("--device", required=device_needed, help=names)


def at_least_1(text: str) -> int:
    """An integer of at least 1."""
    return _number(int, "a whole number", text, lambda number: number >= 1, "at least 1")


def at_least_0(text: str) -> float:
    """A finite number of at least 0."""
    words = "a number of at least 0"
    return _number(float, "a number", text, lambda number: 0 <= number < math.inf, words)


def above_0(text: str) -> float:
    """A finite number above 0."""
    words = "a number above 0"
    return _number(float, "a number", text, lambda number: 0 < number < math.inf, words)


def file_to_write(text: str) -> Path:
    """A file that can be written once there is something to write."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: {error.strerror}") from error
    return path


def picture_to_write(text: str) -> Path:
    """A file to write whose ending names a format of pictures."""
    path = file_to_write(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: must end in one of {', '.join(_PICTURES)}")
    return path


def parse_with_keys(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those that are configuration keys."""
    args, keys = parser.parse_known_args(argv)
    refuse_typos(parser, keys)
    return args, keys


def refuse_typos(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """End with the parser's error where a word without a section looks like one of its options."""
    options = re.findall(r"--[a-z-]+", parser.format_usage())
    for word in keys:
        name = word.partition("=")[0]
        if name.startswith("--") and "." not in name:
            close = get_close_matches(name, options, n=1, cutoff=0.75)
            if close:
                parser.error(f"{name}: no such option; did you mean {close[0]}?")


def device_of(name: str) -> "Device":
    """The device that `--device` names; raises `ConfigError`."""
    from titan_relay.measure.devices import device_named  # imports torch

    try:
        return device_named(name)
    except ValueError as error:
        raise ConfigError(f"--device {name}: {error}") from error


def _number(
    kind: Callable[[str], N], what: str, text: str, allows: Callable[[N], bool], must_be: str
) -> N:
    try:
        number = kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from error
    if not allows(number):
        raise argparse.ArgumentTypeError(f"{text} must be {must_be}")
    return number
