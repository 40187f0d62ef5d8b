"""Files that cannot be read and arguments that cannot be understood, with their messages."""

from typing import get_args

from tests.config.wrong import Wrong, without
from titan_relay.config.errors import either
from titan_relay.config.schema_model import FamilyName

_FAMILIES = either([f'"{name}"' for name in get_args(FamilyName)])

FILES = [
    Wrong(
        "architecture number missing",
        "case.toml: model.rope_theta is missing: it has no default; give a finite number above 0",
        whole=without("rope_theta = 1e6"),
    ),
    Wrong(
        "no model at all",
        f"case.toml: model.family is missing: it has no default; give {_FAMILIES} (missing "
        "too: model.dim, model.num_layers, model.num_heads, model.vocab_size, "
        "model.max_seq_len, model.rope_theta, "
        "model.norm_eps, model.tie_word_embeddings, model.moe.num_experts, "
        "model.moe.top_k, model.moe.expert_dim, model.moe.score_func, model.moe.route_norm)",
        whole=b"[training]\nsteps = 5\n",
    ),
    Wrong(
        "not UTF-8",
        "case.toml: line 2: byte 0xe9 is not UTF-8; save the file as UTF-8",
        whole=b"[training]\nsteps = 5 # caf\xe9\n",
    ),
    Wrong(
        "UTF-16",
        "case.toml: line 1: the file is UTF-16; save it as UTF-8",
        whole="[training]\n".encode("utf-16"),
    ),
    Wrong(
        "unclosed string",
        'case.toml: line 2: dtype = "float32: text in quotes must end on its line',
        whole=b'[training]\ndtype = "float32\nsteps = 5\n',
    ),
    Wrong(
        "Python's spelling of true",
        "case.toml: line 2: enable = True: TOML spells True as true",
        whole=b"[compile]\nenable = True\n",
    ),
    Wrong(
        "text without quotes",
        "case.toml: line 2: name = AdamW: not a TOML value; text goes in quotes",
        whole=b"[optimizer]\nname = AdamW\n",
    ),
    Wrong(
        "key given twice",
        "case.toml: line 4: steps = 6: this key is already set above; keep one of them",
        toml="[training]\nsteps = 5\nsteps = 6",
    ),
    Wrong(
        "section given twice",
        "case.toml: line 5: [training]: this table is already there above; put its keys into one",
        toml="[training]\nsteps = 5\n[debug]\n[training]\nseq_len = 64",
    ),
    Wrong(
        "base that is not there",
        'case.toml: base = "godo.toml": no such file; did you mean good.toml?',
        whole=b'base = "godo.toml"\n',
    ),
    Wrong(
        "base that extends itself",
        'case.toml: base = "case.toml": extends itself (case.toml -> case.toml); remove '
        "one of these bases",
        whole=b'base = "case.toml"\n',
    ),
    Wrong(
        "base that is no name",
        "case.toml: base = 5: must be the name of a file, or a list of names",
        whole=b"base = 5\n",
    ),
]

PATHS = [
    Wrong(
        "variable of a path that is not set",
        'case.toml: dump_folder = "$NO_SUCH_FOLDER/a": the variable NO_SUCH_FOLDER is not set '
        "here; export it, or write the path out",
        toml='dump_folder = "$NO_SUCH_FOLDER/a"',
    ),
    Wrong(
        "variable of one file of a mixture",
        'case.toml: data.mixture[0].files[1] = "${NO_SUCH_FOLDER}/b.jsonl": the variable '
        "NO_SUCH_FOLDER is not set here; export it, or write the path out",
        toml='[[data.mixture]]\nname = "a"\nweight = 1\n'
        'files = ["corpus/a.jsonl", "${NO_SUCH_FOLDER}/b.jsonl"]',
    ),
    Wrong(
        "home of nobody",
        'command line: --checkpoint.folder = "~no-such-user/a": there is no home folder of '
        '~no-such-user; write "./~no-such-user/a" for that name here',
        argv=("--checkpoint.folder=~no-such-user/a",),
    ),
    Wrong(
        "variable of a base that is not set",
        'case.toml: base = "$NO_SUCH_FOLDER/base.toml": the variable NO_SUCH_FOLDER is not set '
        "here; export it, or write the path out",
        whole=b'base = "$NO_SUCH_FOLDER/base.toml"\n',
    ),
]

COMMAND_LINES = [
    Wrong(
        "misspelt option",
        'command line: --confg "run.toml": unknown key; did you mean --config?',
        argv=("--confg", "run.toml"),
    ),
    Wrong(
        "misspelt key as an argument",
        'command line: --training.stepz "5": unknown key; did you mean training.steps?',
        argv=("--training.stepz", "5"),
    ),
    Wrong(
        "key with dashes",
        'command line: --training.local-batch-size "5": unknown key; did you mean '
        "training.local_batch_size?",
        argv=("--training.local-batch-size", "5"),
    ),
    Wrong(
        "word for an integer",
        'command line: --training.steps = "many": must be an integer of at least 1',
        argv=("--training.steps", "many"),
    ),
    Wrong(
        "exponent for an integer",
        "command line: --training.steps = 1e3: must be an integer of at least 1; write 1000",
        argv=("--training.steps=1e3",),
    ),
    Wrong(
        "Python's true as an argument",
        'command line: --compile.enable = "True": must be true or false; write true without quotes',
        argv=("--compile.enable", "True"),
    ),
    Wrong(
        "value missing",
        "command line: --training.steps: needs a value, an integer of at least 1",
        argv=("--training.steps",),
    ),
    Wrong(
        "value missing before another",
        "command line: --training.steps: needs a value, an integer of at least 1",
        argv=("--training.steps", "--compile.enable"),
    ),
    Wrong(
        "section as an argument",
        "command line: --training: is a section; name one of its keys, such as "
        "--training.local_batch_size",
        argv=("--training", "5"),
    ),
    Wrong(
        "argument without dashes",
        'command line: "training.steps=5": not an option; write --section.key value',
        argv=("training.steps=5",),
    ),
    Wrong(
        "pattern that the shell has expanded",
        'command line: "corpus/b.jsonl": not an option; write --section.key value; if the shell '
        "has expanded a pattern, quote it: --data.files 'FOLDER/*.jsonl'",
        argv=("--data.files", "corpus/a.jsonl", "corpus/b.jsonl", "corpus/c.jsonl"),
    ),
    Wrong(
        "pattern that the shell has expanded after an equals sign",
        'command line: "corpus/b.parquet": not an option; write --section.key value; if the shell '
        "has expanded a pattern, quote it: --validator.data.files 'FOLDER/*.jsonl'",
        argv=("--validator.data.files=corpus/a.parquet", "corpus/b.parquet"),
    ),
    Wrong(
        "argument without dashes after a number",
        'command line: "6": not an option; write --section.key value',
        argv=("--training.steps", "5", "6"),
    ),
    Wrong(
        "second file",
        'command line: --config = "good.toml": case.toml is given too; name one, which can '
        "extend a base file",
        argv=("--config", "good.toml"),
    ),
    Wrong(
        "nan as an argument",
        "command line: --optimizer.lr = nan: must be a finite number above 0",
        argv=("--optimizer.lr", "nan"),
    ),
    Wrong(
        "none for a required number",
        'command line: --model.dim = "none": must be an integer of at least 1',
        argv=("--model.dim", "none"),
    ),
]
