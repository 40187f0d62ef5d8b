"""Keys that contradict each other, and data and tokenizers that are not there."""

from tests.config.wrong import Wrong

_OFF = "needs checkpoint.enable = true; set that, or leave this out"

REQUESTS = [
    Wrong(
        "weights to load without checkpoints",
        f'command line: --checkpoint.initial_load_path = "/no/such/folder": {_OFF}',
        argv=("--checkpoint.initial_load_path", "/no/such/folder", "--checkpoint.load_step=3"),
    ),
    Wrong(
        "weights of Hugging Face to load without checkpoints",
        f"case.toml: checkpoint.initial_load_in_hf = true: {_OFF}",
        toml="[checkpoint]\nenable = false\ninitial_load_in_hf = true",
    ),
    Wrong(
        "step to load without checkpoints",
        f"case.toml: checkpoint.load_step = 7: {_OFF}",
        toml="[checkpoint]\nload_step = 7",
    ),
    Wrong(
        "step 0 to load without checkpoints",
        f"command line: --checkpoint.load_step = 0: {_OFF}",
        argv=("--checkpoint.load_step=0", "--checkpoint.enable=false"),
    ),
    Wrong(
        "export without checkpoints",
        f"case.toml: checkpoint.last_save_in_hf = true: {_OFF}",
        toml="[checkpoint]\nlast_save_in_hf = true",
    ),
    Wrong(
        "checkpoints that are only loaded and are off",
        f"command line: --checkpoint.load_only = true: {_OFF}",
        argv=("--checkpoint.load_only",),
    ),
    Wrong(
        "export of a run that saves nothing",
        "case.toml: checkpoint.last_save_in_hf = true: needs checkpoint.load_only = false; set "
        "that, or leave this out",
        toml="[checkpoint]\nenable = true\nload_only = true\nlast_save_in_hf = true",
    ),
]

COMBINATIONS = [
    Wrong(
        "more experts per token than experts",
        "case.toml: model.moe.top_k = 17: must be at most model.moe.num_experts = 16",
        toml="[model.moe]\ntop_k = 17",
    ),
    Wrong(
        "heads not divisible by key heads",
        "case.toml: model.num_kv_heads = 3: must divide model.num_heads = 4; use 1, 2 or 4",
        toml="[model]\nnum_kv_heads = 3",
    ),
    Wrong(
        "odd head",
        "case.toml: model.head_dim = 15: must be even for rotary embeddings; use 14 or 16",
        toml="[model]\nhead_dim = 15",
    ),
    Wrong(
        "schedule shorter than training",
        "case.toml: lr_scheduler.total_steps = 10: must be at least training.steps = 20; "
        "past its end the learning rate is undefined",
        toml="[lr_scheduler]\ntotal_steps = 10",
    ),
    Wrong(
        "memory budget without compile",
        'case.toml: activation_checkpoint.mode = "memory_budget": needs compile.enable = '
        'true with "model" in compile.components; or use "none", "selective" or "full"',
        toml=('[relay]\ndispatcher = "alltoall"\n[activation_checkpoint]\nmode = "memory_budget"'),
    ),
    Wrong(
        "activation checkpointing beside the relay",
        'case.toml: activation_checkpoint.mode = "full": must be "none" with relay.dispatcher = '
        '"relay", where [attention_retention] decides what is computed again; leave it out',
        toml='[activation_checkpoint]\nmode = "full"',
    ),
    Wrong(
        "the relay's determinism without the relay",
        'case.toml: relay.deterministic = true: needs relay.dispatcher = "relay"; '
        "use debug.deterministic",
        toml='[relay]\ndispatcher = "alltoall"\ndeterministic = true',
    ),
    Wrong(
        "retention beside the all-to-all",
        'case.toml: attention_retention.mode = "full": needs relay.dispatcher = "relay"; set '
        "that, or leave this out",
        toml='[relay]\ndispatcher = "alltoall"\n[attention_retention]\nmode = "full"',
    ),
    Wrong(
        "levels for another number of layers",
        'case.toml: attention_retention.layers = ["full", "output"]: must have a level for each of '
        'model.num_layers = 4, not 2; one level for all is mode = "full" and the like',
        toml='[attention_retention]\nlayers = ["full", "output"]',
    ),
    Wrong(
        "levels given twice",
        'case.toml: attention_retention.mode = "output": attention_retention.layers is given too; '
        "give one of them",
        toml=(
            '[attention_retention]\nmode = "output"\n'
            'layers = ["full", "output", "output", "output"]'
        ),
    ),
    Wrong(
        "budget that nobody spends",
        "case.toml: attention_retention.budget_gib = 2.0: needs attention_retention.mode = "
        '"auto"; set that, or leave this out',
        toml="[attention_retention]\nbudget_gib = 2.0",
    ),
    Wrong(
        "block inputs on the host without a budget",
        'case.toml: attention_retention.host_budget_gib = "none" (default): goes together with '
        'attention_retention.block_inputs = "host" or "auto"; give both or neither',
        toml='[attention_retention]\nblock_inputs = "host"',
    ),
    Wrong(
        "host budget for nothing",
        "case.toml: attention_retention.host_budget_gib = 8.0: goes together with "
        'attention_retention.block_inputs = "host" or "auto"; give both or neither',
        toml="[attention_retention]\nhost_budget_gib = 8.0",
    ),
    Wrong(
        "margin for nothing",
        "case.toml: attention_retention.safety_margin = 0.3: needs attention_retention.mode = "
        '"auto" or attention_retention.block_inputs = "auto"; set that, or leave this out',
        toml="[attention_retention]\nsafety_margin = 0.3",
    ),
    Wrong(
        "a limit for a ring that is fixed",
        'case.toml: relay.max_imbalance = 1.5: needs relay.circulate = "auto"; leave it out',
        toml='[relay]\ncirculate = "tokens"\nmax_imbalance = 1.5',
    ),
    Wrong(
        "chunks of a loss in one piece",
        'case.toml: loss.num_chunks = 4: needs loss.name = "chunked_cross_entropy"; set that, '
        "or leave this out",
        toml="[loss]\nnum_chunks = 4",
    ),
    Wrong(
        "size of chunks of a loss in one piece",
        'case.toml: loss.max_chunk_mib = 64.0: needs loss.name = "chunked_cross_entropy"; set '
        "that, or leave this out",
        toml="[loss]\nmax_chunk_mib = 64",
    ),
    Wrong(
        "size of chunks that are counted",
        'case.toml: loss.max_chunk_mib = 64.0: needs loss.num_chunks = "auto"; set that, or '
        "leave this out",
        toml='[loss]\nname = "chunked_cross_entropy"\nnum_chunks = 4\nmax_chunk_mib = 64',
    ),
    Wrong(
        "warning only without determinism",
        "case.toml: debug.deterministic_warn_only = true: needs debug.deterministic = true; "
        "set that, or leave this out",
        toml="[debug]\ndeterministic_warn_only = true",
    ),
    Wrong(
        "short profiling cycle",
        "case.toml: profiler.profile_freq = 3: must be at least profiler_warmup + "
        "profiler_active = 3 + 1 = 4",
        toml="[profiler]\nenable_profiling = true\nprofile_freq = 3",
    ),
    Wrong(
        "Hugging Face checkpoint without a path",
        "case.toml: checkpoint.initial_load_in_hf = true: needs checkpoint.initial_load_path; "
        "set that, or leave this out",
        toml="[checkpoint]\nenable = true\ninitial_load_in_hf = true",
    ),
    Wrong(
        "Hugging Face save of everything",
        "case.toml: checkpoint.last_save_model_only = false: checkpoint.last_save_in_hf = "
        "true writes only the model; use true",
        toml="[checkpoint]\nenable = true\nlast_save_in_hf = true\nlast_save_model_only = false",
    ),
    Wrong(
        "relative checkpoint path",
        'case.toml: checkpoint.initial_load_path = "old": must be an absolute path; write '
        '"{folder}/old"',
        toml='[checkpoint]\nenable = true\ninitial_load_path = "old"',
    ),
    Wrong(
        "checkpoint path that is not there",
        'case.toml: checkpoint.initial_load_path = "/nonexistent/old": no such folder',
        toml='[checkpoint]\nenable = true\ninitial_load_path = "/nonexistent/old"',
    ),
    Wrong(
        "first checkpoint of a run that saves nothing",
        "case.toml: checkpoint.enable_first_step_checkpoint = true: checkpoint.load_only = "
        "true saves nothing; use false",
        toml="[checkpoint]\nenable = true\nload_only = true\nenable_first_step_checkpoint = true",
    ),
]

DATA = [
    Wrong(
        "no documents",
        "case.toml: data.files = []: no documents; give data.files, data.dataset or data.mixture",
        toml="[data]\nfiles = []",
    ),
    Wrong(
        "documents from two places",
        'good.toml: data.files = ["corpus/*.jsonl"]: data.dataset is given too; give one of them',
        toml='[data]\ndataset = "allenai/c4"',
    ),
    Wrong(
        "subset without a dataset",
        'case.toml: data.subset = "en": needs data.dataset',
        toml='[data]\nsubset = "en"',
    ),
    Wrong(
        "glob that matches nothing",
        'case.toml: data.files = "corpus/*.parquet": matches no file (from the folder {folder})',
        toml='[data]\nfiles = ["corpus/*.parquet"]',
    ),
    Wrong(
        "misspelt file",
        'case.toml: data.files = "corpus/trian.jsonl": no such file; did you mean '
        "corpus/train.jsonl?",
        toml='[data]\nfiles = ["corpus/trian.jsonl"]',
    ),
    Wrong(
        "folder for a file",
        'case.toml: data.files = "corpus": is a folder; name its files, such as "corpus/*.jsonl"',
        toml='[data]\nfiles = ["corpus"]',
    ),
    Wrong(
        "file in a folder that is not there",
        'case.toml: data.files = "corpora/train.jsonl": no such file; there is no folder '
        "corpora in {folder}",
        toml='[data]\nfiles = ["corpora/train.jsonl"]',
    ),
    Wrong(
        "file of another kind",
        'case.toml: data.files = "corpus/notes.md": must end in .jsonl, .json, .parquet or .txt',
        toml='[data]\nfiles = ["corpus/*"]',
    ),
    Wrong(
        "mixture with a name twice",
        'case.toml: data.mixture = ["a", "a"]: the name "a" is there twice; give each its own',
        toml=(
            '[data]\nfiles = []\n[[data.mixture]]\nname = "a"\nweight = 1\nfiles = '
            '["corpus/train.jsonl"]\n[[data.mixture]]\nname = "a"\nweight = 1\nfiles = '
            '["corpus/train.jsonl"]'
        ),
    ),
    Wrong(
        "mixture entry with nothing to read",
        'case.toml: data.mixture = ["a"]: "a" needs either dataset or files, and not both',
        toml='[data]\nfiles = []\n[[data.mixture]]\nname = "a"\nweight = 1',
    ),
    Wrong(
        "validation that never ends",
        "case.toml: validator.data.infinite = true: validator.steps = -1 reads all of it, "
        "which would never end; use false, or a number of validator.steps",
        toml=(
            '[validator]\nenable = true\n[validator.data]\nfiles = ["corpus/train.jsonl"]'
            "\ninfinite = true"
        ),
    ),
    Wrong(
        "validation without documents",
        "case.toml: validator.data.files = [] (default): no documents; give "
        "validator.data.files, validator.data.dataset or validator.data.mixture",
        toml="[validator]\nenable = true",
    ),
    Wrong(
        "no tokenizer",
        'case.toml: tokenizer.path = "": name a tiktoken rank file or a Hugging Face '
        "tokenizer folder",
        toml='[tokenizer]\npath = ""',
    ),
    Wrong(
        "tokenizer that is not there",
        'case.toml: tokenizer.path = "tokeniser.tiktoken": no such file or folder; did you '
        "mean tokenizer.tiktoken?",
        toml='[tokenizer]\npath = "tokeniser.tiktoken"',
    ),
    Wrong(
        "folder for a rank file",
        'case.toml: tokenizer.path = "corpus": has no tiktoken rank file; name one, or use '
        'kind = "huggingface"',
        toml='[tokenizer]\npath = "corpus"',
    ),
    Wrong(
        "tokenizer folder without a tokenizer",
        'case.toml: tokenizer.path = "corpus": has no tokenizer.json; it has: '
        "notes.md, train.jsonl",
        toml='[tokenizer]\nkind = "huggingface"\npath = "corpus"',
    ),
    Wrong(
        "misspelt pattern",
        'case.toml: tokenizer.pattern = "qwen": must be gpt2, cl100k, o200k, llama3 or '
        "qwen2, or a regular expression",
        toml='[tokenizer]\npattern = "qwen"',
    ),
    Wrong(
        "no eos token",
        'case.toml: tokenizer.eos_token = "none": a rank file names no eos token; name '
        "one, or set tokenizer.add_eos = false",
        toml='[tokenizer]\neos_token = "none"',
    ),
    Wrong(
        "token id beyond the vocabulary",
        'case.toml: tokenizer.special_tokens = { "<|endoftext|>" = 512 }: must be below '
        "model.vocab_size = 512",
        toml='[tokenizer]\nspecial_tokens = { "<|endoftext|>" = 512 }',
    ),
    Wrong(
        "two tokens with one id",
        'case.toml: tokenizer.special_tokens = { "<a>" = 5, "<|endoftext|>" = 5 }: every '
        "token needs its own id",
        toml='[tokenizer]\nspecial_tokens = { "<a>" = 5, "<|endoftext|>" = 5 }',
    ),
]
