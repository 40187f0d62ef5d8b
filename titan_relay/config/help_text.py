"""The text of ``--help``: every key with its type, default and meaning."""

import textwrap

from titan_relay.config.expectation import default_text, short_type
from titan_relay.config.keys import Key, fields_of, item_of, keys, sections

_WIDTH = 100
_HEAD = """\
usage: titan-relay train --config FILE.toml [--section.key value ...]

Trains the model that FILE.toml describes, on one process or, below torchrun, on many:

  titan-relay train --config train_configs/demo.toml
  torchrun --nproc_per_node 4 train.py --config train_configs/demo.toml
  torchrun --nproc_per_node 4 -m titan_relay train --config train_configs/demo.toml

Every key below can be written in the file, as "key = value" under [section], or given here, which
takes precedence:

  --training.steps 500            or --training.steps=500
  --compile.enable true           or --compile.enable alone
  --compile.components model,loss or a TOML list: '["model", "loss"]'
  --lr_scheduler.total_steps none unset

  --config FILE.toml   the configuration; its key "base" names a file, or several, to extend
  --print-config       print the final configuration as TOML and exit
  --plan               print what memory the run will take on this machine, and exit
  --help               print this and exit
"""


def help_text() -> str:
    """Usage and all keys by section."""
    return _HEAD + "".join(_section_text(path) for path in sections())


def _section_text(path: str) -> str:
    head = f"\n[{path}]  {first_line(sections()[path])}\n" if path else "\n"
    members = [key for key in keys().values() if key.section == path]
    return head + "".join(_key_text(key) for key in members)


def first_line(cls: type) -> str:
    """The first line of a section's docstring."""
    return (cls.__doc__ or "").splitlines()[0]


def _key_text(key: Key) -> str:
    line = f"--{key.path}  ({short_type(key.type, key.rule)}; {default_text(key)})"
    return _indented(line, 2) + _indented(key.meaning, 6) + _entry_text(key)


def _entry_text(key: Key) -> str:
    """The keys of one entry of a list of tables."""
    item = item_of(key.type)
    if not isinstance(item, type) or not hasattr(item, "__dataclass_fields__"):
        return ""
    return "".join(
        f"        {each.name}  ({short_type(each.type, each.rule)}; {default_text(each)})\n"
        + _indented(each.meaning, 12)
        for each in fields_of(item, key.path)
    )


def _indented(text: str, num_spaces: int) -> str:
    """`text` in indented lines of at most `_WIDTH` characters."""
    return (
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=" " * num_spaces,
            subsequent_indent=" " * max(num_spaces, 6),
            break_on_hyphens=False,
            break_long_words=False,
        )
        + "\n"
    )
