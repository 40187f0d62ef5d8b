"""Every key with its type, default and meaning: the text of ``--help``, and ``docs/config.md``.

python -m titan_relay.config.reference > docs/config.md
"""

import sys
import textwrap

from titan_relay.config.fields import Key, fields_of, is_table, item_of
from titan_relay.config.reader import default_text, short_type
from titan_relay.config.schema import keys, sections

# Sections whose keys set the torchtitan field of the same name, unless a key says otherwise.
_SAME_IN_TORCHTITAN = (
    "",
    "training",
    "parallelism",
    "optimizer",
    "lr_scheduler",
    "activation_checkpoint",
    "compile",
    "checkpoint",
    "validator",
    "metrics",
    "comm",
    "profiler",
    "debug",
)

_INTRODUCTION = """\
# Configuration

This page is generated: `python -m titan_relay.config.reference > docs/config.md`.

A run is described by one TOML file and, over it, by the command line:

```
torchrun --nproc_per_node 8 train.py --config train_configs/my_model.toml --training.steps 500
```

**Precedence.** Command line, then file, then the files it names as `base`, then the default.
`--print-config` prints the outcome as TOML, every key included; that file gives the same run.

**Files.** UTF-8. `base = "common.toml"` at the top of a file (or a list of names, the later over
the earlier) names files to extend, relative to the file itself. Tables are merged key by key;
lists are replaced. All other paths are relative to the working directory. In every path `~` and
`$VARIABLES` are expanded, also in a file, in quotes and after `--key=`; `--print-config` prints
what they stand for.

**Values.** A value has the type of its key, exactly: `"42"`, `42.0` and `1e3` are no integers and
`"false"` is no boolean; only an integer may stand for a float. TOML has no null: `"none"` unsets a
key whose type says "or none". On the command line, text needs no quotes, a list is written
`a,b` or `'["a", "b"]'`, a boolean `true`, `false`, or the option alone for true; of a key given
twice the last value counts.

**Errors.** An unknown key, a wrong type, a value out of range, or keys that do not go together end
the run before anything is built: one line with the file (or "command line"), the key, the value,
and what would be right, and exit code 2.

**Keys that are off.** Where a section or a feature is off, its keys in a file are not read, so
that one file serves with it and without; on the command line they are named in a line at the start.
A key that asks for something (weights or a step to load, an export, a budget) is an error there.

**Ranks.** `data_parallel_replicate_degree * data_parallel_shard_degree * context_parallel_degree *
tensor_parallel_degree * pipeline_parallel_degree` is the number of ranks.
`expert_parallel_degree` is no factor of it: the ring of experts runs over ranks of `dp_shard`, `cp`
and `tp`, so it divides their product, and the number of experts.

## What is computed in which type

| What | Type |
|---|---|
| Parameters, their gradients, optimizer states | `training.dtype` |
| Computation of the layers, parameters gathered by FSDP | `training.mixed_precision_param`; \
float32 on CPU |
| Sums of gradients over ranks | `training.mixed_precision_reduce` |
| Experts on the ring | as the computation of the layers |
| Expert weight gradients on the ring | `relay.grad_dtype` |
| Router: logits, scores, auxiliary loss and z-loss | float32 |
| Loss, from the logits on | float32 |
"""


_WIDTH = 100
_USAGE = """\
usage: titan-relay train --config FILE.toml [--section.key value ...]

Trains the model that FILE.toml describes, on one process or, below torchrun, on many:

  titan-relay train --config FILE.toml
  torchrun --nproc_per_node 4 -m titan_relay train --config FILE.toml

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
    return _USAGE + "".join(_help_section(path) for path in sections())


def _help_section(path: str) -> str:
    head = f"\n[{path}]  {first_line(sections()[path])}\n" if path else "\n"
    members = [key for key in keys().values() if key.section == path]
    return head + "".join(_help_key(key) for key in members)


def first_line(cls: type) -> str:
    """The first line of a section's docstring."""
    return (cls.__doc__ or "").splitlines()[0]


def _help_key(key: Key) -> str:
    line = f"--{key.path}  ({short_type(key.type, key.rule)}; {default_text(key)})"
    entry = "".join(
        f"        {each.name}  ({short_type(each.type, each.rule)}; {default_text(each)})\n"
        + _indented(each.meaning, 12)
        for each in _entry_keys(key)
    )
    return _indented(line, 2) + _indented(key.meaning, 6) + entry


def _entry_keys(key: Key) -> list[Key]:
    """The keys of one entry of a list of tables; none of any other key."""
    item = item_of(key.type)
    return fields_of(item, key.path) if is_table(item) else []


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


def reference() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(path) for path in sections())


def _section(path: str) -> str:
    title = f"`[{path}]`" if path else "Top level"
    members = [key for key in keys().values() if key.section == path]
    rows = "".join(_row(key) for key in members)
    entries = "".join(_entry_table(key) for key in members)
    return f"\n## {title}\n\n{first_line(sections()[path])}\n\n{_HEAD}{rows}{entries}"


_HEAD = "| Key | Type | Default | Meaning | In torchtitan |\n|---|---|---|---|---|\n"


def _row(key: Key) -> str:
    kind = _cell(short_type(key.type, key.rule))
    default = "required" if default_text(key) == "required" else f"`{_cell(default_text(key))}`"
    return f"| `{key.name}` | {kind} | {default} | {_cell(key.meaning)} | {_torchtitan(key)} |\n"


def same_in_torchtitan(key: Key) -> bool:
    """Whether torchtitan has a field of the same dotted path."""
    return key.rule.titan is None and key.section in _SAME_IN_TORCHTITAN


def _torchtitan(key: Key) -> str:
    if same_in_torchtitan(key):
        return "same"
    if not key.rule.titan:
        return "-"
    prefix = "validator." if key.section.startswith("validator.") else ""
    return f"`{prefix}{_cell(key.rule.titan)}`"


def _entry_table(key: Key) -> str:
    rows = "".join(_row(each) for each in _entry_keys(key))
    if rows and key.section != "data":
        return f"\nEntries of `[[{key.path}]]` are those of `[[data.mixture]]`.\n"
    head = f"\n### `[[{key.path}]]`\n\n{first_line(item_of(key.type))}\n\n{_HEAD}" if rows else ""
    return head + rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
