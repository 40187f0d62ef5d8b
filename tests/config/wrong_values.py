"""Wrong names and wrong values of single keys, with their messages."""

from tests.config.wrong import Wrong

NAMES = [
    Wrong(
        "misspelt key",
        "case.toml: training.stepz = 5: unknown key; did you mean training.steps?",
        toml="[training]\nstepz = 5",
    ),
    Wrong(
        "misspelt section",
        "case.toml: [paralelism]: unknown section; did you mean [parallelism]?",
        toml="[paralelism]\ntensor_parallel_degree = 2",
    ),
    Wrong(
        "misspelt nested section",
        "case.toml: [model.mo]: unknown section; did you mean [model.moe]?",
        toml="[model.mo]\ntop_k = 2",
    ),
    Wrong(
        "nested section at the top",
        "case.toml: [moe]: unknown section; did you mean [model.moe]?",
        toml="[moe]\ntop_k = 2",
    ),
    Wrong(
        "key of another section",
        "case.toml: training.lr = 1e-3: unknown key; it belongs in [optimizer]",
        toml="[training]\nlr = 1e-3",
    ),
    Wrong(
        "key of two other sections",
        "case.toml: training.add_eos = true: unknown key; it belongs in [tokenizer]",
        toml="[training]\nadd_eos = true",
    ),
    Wrong(
        "key outside its section",
        "case.toml: seq_len = 64: unknown key; it belongs in [training]",
        toml="seq_len = 64",
    ),
    Wrong(
        "key from torchtitan's older files",
        "case.toml: training.data_parallel_degree = 2: unknown key; it is "
        "parallelism.data_parallel_shard_degree here",
        toml="[training]\ndata_parallel_degree = 2",
    ),
    Wrong(
        "seed in the training section",
        'case.toml: training.seed = "42": unknown key; it is debug.seed here',
        toml='[training]\nseed = "42"',
    ),
    Wrong(
        "compile in the training section",
        'case.toml: training.compile = "false": unknown key; it is compile.enable here',
        toml='[training]\ncompile = "false"',
    ),
    Wrong(
        "section from torchtitan's older files",
        "case.toml: [job]: unknown section; it is dump_folder and [debug] here",
        toml="[job]\ndescription = 'x'",
    ),
    Wrong(
        "key like no other",
        "case.toml: comm.xyzzy = 1: unknown key; known in [comm]: init_timeout_seconds, "
        "train_timeout_seconds, trace_buf_size, save_traces_folder, save_traces_file_prefix",
        toml="[comm]\nxyzzy = 1",
    ),
    Wrong(
        "section given as a value",
        "case.toml: training = 5: is a section; write [training] and its keys below it",
        toml="training = 5",
    ),
    Wrong(
        "key given as a section",
        "case.toml: training.steps = { value = 5 }: must be an integer of at least 1",
        toml="[training.steps]\nvalue = 5",
    ),
    Wrong(
        "unknown key of a mixture",
        "case.toml: data.mixture[0].wight = 1.0: unknown key; did you mean weight?",
        toml='[[data.mixture]]\nname = "a"\nwight = 1.0',
    ),
]

VALUES = [
    Wrong(
        "integer written with an exponent",
        "case.toml: training.steps = 1e3: must be an integer of at least 1; write 1000",
        toml="[training]\nsteps = 1e3",
    ),
    Wrong(
        "integer in quotes",
        'case.toml: training.steps = "42": must be an integer of at least 1; write 42 '
        "without quotes",
        toml='[training]\nsteps = "42"',
    ),
    Wrong(
        "seed in quotes",
        'case.toml: debug.seed = "42": must be an integer of at least 0; write 42 without quotes',
        toml='[debug]\nseed = "42"',
    ),
    Wrong(
        "boolean for an integer",
        "case.toml: training.steps = true: must be an integer of at least 1",
        toml="[training]\nsteps = true",
    ),
    Wrong(
        "integer for a boolean",
        "case.toml: compile.enable = 1: must be true or false",
        toml="[compile]\nenable = 1",
    ),
    Wrong(
        "boolean in quotes",
        'case.toml: compile.enable = "false": must be true or false; write false without quotes',
        toml='[compile]\nenable = "false"',
    ),
    Wrong(
        "fraction for an integer",
        "case.toml: parallelism.expert_parallel_degree = 2.5: must be an integer of at least 1",
        toml="[parallelism]\nexpert_parallel_degree = 2.5",
    ),
    Wrong(
        "integer beyond 64 bits",
        "case.toml: training.steps = 100000000000000000000: must be an integer of at least "
        "1; integers have 64 bits",
        toml="[training]\nsteps = 100000000000000000000",
    ),
    Wrong(
        "nan",
        "case.toml: optimizer.lr = nan: must be a finite number above 0",
        toml="[optimizer]\nlr = nan",
    ),
    Wrong(
        "infinity",
        "case.toml: training.max_norm = inf: must be a finite number above 0",
        toml="[training]\nmax_norm = inf",
    ),
    Wrong(
        "number in quotes",
        'case.toml: optimizer.lr = "1e-3": must be a finite number above 0; write 1e-3 '
        "without quotes",
        toml='[optimizer]\nlr = "1e-3"',
    ),
    Wrong(
        "negative steps",
        "case.toml: training.steps = -1: must be an integer of at least 1",
        toml="[training]\nsteps = -1",
    ),
    Wrong(
        "zero degree",
        "case.toml: parallelism.data_parallel_shard_degree = 0: must be an integer of at "
        "least 1 (or -1)",
        toml="[parallelism]\ndata_parallel_shard_degree = 0",
    ),
    Wrong(
        "beta of one",
        "case.toml: optimizer.beta2 = 1.0: must be a finite number of at least 0 and below 1",
        toml="[optimizer]\nbeta2 = 1.0",
    ),
    Wrong(
        "number for a string",
        'case.toml: tokenizer.path = 5: must be a string; write "5" in quotes',
        toml="[tokenizer]\npath = 5",
    ),
    Wrong(
        "empty string",
        'case.toml: checkpoint.folder = "": must be a string that is not empty',
        toml='[checkpoint]\nfolder = ""',
    ),
    Wrong(
        "choice in another case",
        'case.toml: optimizer.name = "adamw": must be "Adam" or "AdamW"; did you mean "AdamW"?',
        toml='[optimizer]\nname = "adamw"',
    ),
    Wrong(
        "unknown choice",
        'case.toml: relay.dispatcher = "deepep": must be "relay" or "alltoall"',
        toml='[relay]\ndispatcher = "deepep"',
    ),
    Wrong(
        "unknown choice in a list",
        'case.toml: compile.components[1] = "optimizer": must be "model" or "loss"',
        toml='[compile]\ncomponents = ["model", "optimizer"]',
    ),
    Wrong(
        "string for a list",
        'case.toml: data.files = "corpus/*.jsonl": must be a list of strings; write '
        '["corpus/*.jsonl"]',
        toml='[data]\nfiles = "corpus/*.jsonl"',
    ),
    Wrong(
        "number in a list of strings",
        'case.toml: data.files[0] = 1: must be a string that is not empty; write "1" in quotes',
        toml="[data]\nfiles = [1]",
    ),
    Wrong(
        "string for a token id",
        'case.toml: tokenizer.special_tokens."<s>" = "1": must be an integer of at least '
        "0; write 1 without quotes",
        toml='[tokenizer]\nspecial_tokens = { "<s>" = "1" }',
    ),
    Wrong(
        "mixture entry without weight",
        "case.toml: data.mixture[0].weight is missing: give a finite number above 0",
        toml='[[data.mixture]]\nname = "a"',
    ),
    Wrong(
        "one checkpoint kept",
        "case.toml: checkpoint.keep_latest_k = 1: must be an integer of at least 2 (or 0)",
        toml="[checkpoint]\nkeep_latest_k = 1",
    ),
    Wrong(
        "date for an integer",
        "case.toml: training.steps = 2026-01-01: must be an integer of at least 1",
        toml="[training]\nsteps = 2026-01-01",
    ),
]
