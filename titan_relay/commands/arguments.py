"""What the command lines of `titan-relay` and of scripts share: the parser, and kinds of values."""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from titan_relay.config import ConfigError
from titan_relay.config.errors import either
from titan_relay.config.paths import NoSuchName, expanded
from titan_relay.config.schema import keys as all_keys
from titan_relay.config.suggest import where_key_belongs

_PICTURES = (".svg", ".png", ".pdf")
_MOST = 10**15  # of any count or size: more is a slip, and would overflow somewhere deep inside

# What argparse says, and how this project says it.
_IN_OUR_WORDS = (
    (r"argument (?:-\w/)?(--\S+): expected .*", r"\1 needs a value"),
    (r"argument (?:-\w/)?(--\S+): ignored explicit argument '(.*)'", r"\1 \2: takes no value"),
    (r"argument (--\S+): (.*)", r"\1 \2"),
    (r"the following arguments are required: (.*)", r"\1 is missing; --help shows an example"),
)

if TYPE_CHECKING:
    from titan_relay.measure.devices import Device

N = TypeVar("N", int, float)


class UnknownOption(ConfigError):
    """An option that the command does not have; another command may have it."""

    def __init__(self, command: str, option: str, fix: str) -> None:
        super().__init__(f"{command}: {option}: no such option; {fix}")
        self.command, self.option = command, option


class CommandParser(argparse.ArgumentParser):
    """A command's options; a mistake in them is a `ConfigError` of one line, without a usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )
        self.actions: dict[str, CommandParser] = {}

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _IN_OUR_WORDS:
            if re.fullmatch(theirs, message, re.DOTALL):
                message = re.sub(theirs, ours, message, flags=re.DOTALL)
                break
        raise ConfigError(f"{self.prog}: {message}")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own is silent where that fails

    def options(self) -> set[str]:
        """Every option, those of the actions too."""
        own = set(re.findall(r"--[a-z-]+", self.format_usage())) | {"--help"}
        return own.union(*(each.options() for each in self.actions.values()))


def command_parser(name: str, text: str | None) -> CommandParser:
    """The parser of `titan-relay NAME`; `text`, its module's docstring, is the help's."""
    return CommandParser(prog=f"titan-relay {name}", description=text)


def script_parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """The parser of a script; `text`, its docstring, is the help's."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


class _Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        given = getattr(namespace, self.dest)
        if given is not None:
            fix = f"{given} is given too; name one, which can extend a base file"
            raise argparse.ArgumentError(self, f"{values}: {fix}")
        setattr(namespace, self.dest, values)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option `--config` of every command that reads a run."""
    help_text = "the run's TOML file"
    parser.add_argument("--config", action=_Once, type=not_empty, required=True, help=help_text)


def add_run_options(parser: argparse.ArgumentParser, *, device_needed: bool) -> None:
    """Options of commands that ask about a run on ranks that need not be there."""
    add_config(parser)
    parser.add_argument("--world-size", type=at_least_1, required=True, help="ranks of the run")
    names = "such as h100-80g, a number of GiB, or cpu"
    parser.add_argument("--device", required=device_needed, help=names)


def whole_number(text: str) -> int:
    """An integer of at least 0."""
    return _number(int, text, 0, "a whole number of at least 0")


def at_least_1(text: str) -> int:
    """An integer of at least 1."""
    return _number(int, text, 1, "a whole number of at least 1")


def at_least_0(text: str) -> float:
    """A finite number of at least 0."""
    return _number(float, text, 0.0, "a number of at least 0")


def above_0(text: str) -> float:
    """A finite number above 0."""
    return _number(float, text, math.ulp(0.0), "a number above 0")


def not_empty(text: str) -> str:
    """Text that names something."""
    if not text:
        raise argparse.ArgumentTypeError("'': is empty; give a name, or leave the option out")
    return text


def a_path(text: str) -> Path:
    """The path of something to read, which says itself what is wrong with it."""
    return Path(path_text(text))


def path_text(text: str) -> str:
    """The same as text, which may be a pattern."""
    try:
        return expanded(not_empty(text))
    except NoSuchName as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def one_of(*words: str) -> Callable[[str], str]:
    """The type of an argument that is one of a few words."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text or repr(text)}: must be {either(words)}")
        return text

    return word


def file_to_write(text: str) -> Path:
    """A file that can be written once there is something to write; its folders may be missing."""
    return _writable(text, is_folder=False)


def write_json(path: Path, content: Any) -> None:
    """Write to a path that `file_to_write` gave, made-up folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def folder_to_write(text: str) -> Path:
    """A folder that files can be written to, or that can be made."""
    return _writable(text, is_folder=True)


def _writable(text: str, *, is_folder: bool) -> Path:
    """The path, once writing there has been tried; no trace is left of that."""
    path = a_path(text)
    try:
        if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
            kinds = (path.is_dir(), "a folder"), (path.is_file(), "a file"), (True, "a device")
            kind = next(name for holds, name in kinds if holds)
            fix = "a folder" if is_folder else "a file"
            raise argparse.ArgumentTypeError(f"{text}: is {kind}; name {fix}")
        made = [each for each in (path, *path.parents) if not each.exists()]
        try:
            (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close() if is_folder else path.open("a").close()
        finally:
            for each in filter(Path.exists, made):
                each.rmdir() if each.is_dir() else each.unlink()
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = f"{error.filename} is no folder" if in_the_way else error.strerror
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: {reason}") from error
    return path


def picture_to_write(text: str) -> Path:
    """A file to write whose ending names a format of pictures."""
    path = file_to_write(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: must end in one of {', '.join(_PICTURES)}")
    return path


def parse(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command that takes no configuration keys."""
    args, rest = parse_with_keys(parser, argv)
    refuse_keys(parser, rest)
    return args


def refuse_keys(parser: CommandParser, rest: Sequence[str]) -> None:
    """Raise `ConfigError` for a word that is left over where no configuration is read."""
    if rest:
        known = ", ".join(sorted(parser.options()))
        parser.error(f"{rest[0]}: not an option; the options are {known}")


def parse_with_keys(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those that are configuration keys."""
    if isinstance(parser, CommandParser):
        refuse_unknown_options(parser, argv or ())
    return parser.parse_known_args(argv)


def refuse_unknown_options(parser: CommandParser, argv: Iterable[str]) -> None:
    """Raise `UnknownOption` for a word that is neither an option of the command nor a key."""
    options = parser.options()
    for name in (word.partition("=")[0] for word in argv if word.startswith("--")):
        key = name.removeprefix("--")
        if not key or "." in key or key in all_keys() or name in options:
            continue
        close = get_close_matches(name, options, n=1, cutoff=0.75)
        fix = f"did you mean {close[0]}?" if close else where_key_belongs(key)
        raise UnknownOption(parser.prog, name, fix)


def device_of(name: str) -> "Device":
    """The device that `--device` names; raises `ConfigError`."""
    from titan_relay.measure.devices import device_named  # imports torch

    try:
        return device_named(name)
    except ValueError as error:
        raise ConfigError(f"--device {name}: {error}") from error


def _number(kind: Callable[[str], N], text: str, lowest: float, must_be: str) -> N:
    try:
        number = kind(text)
    except ValueError:
        number = kind("-1")
    if lowest <= number <= _MOST:
        return number
    limit = f"at most {_MOST:.0e}" if _MOST < number < math.inf else must_be
    shown = text if text.strip() else repr(text)
    raise argparse.ArgumentTypeError(f"{shown[:100]}: must be {limit}")
