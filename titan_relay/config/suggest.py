"""What the user of an unknown name probably meant."""

import difflib
from collections.abc import Iterable

from titan_relay.config.schema import keys, sections

# Names that torchtitan's TOML files had, or that its Python configs have, and where they are here.
_MOVED = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.config_file": "--config on the command line",
    "model.name": "model.family",
    "model.flavor": "the architecture numbers of [model]",
    "model.tokenizer_path": "tokenizer.path",
    "model.hf_assets_path": "tokenizer.path",
    "model.n_layers": "model.num_layers",
    "model.n_heads": "model.num_heads",
    "model.n_kv_heads": "model.num_kv_heads",
    "model.enable_weight_tying": "model.tie_word_embeddings",
    "hf_assets_path": "tokenizer.path",
    "training.dataset": "data.dataset",
    "training.dataset_path": "data.files",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "optimizer.fused": "optimizer.implementation",
    "profiling": "[profiler]",
    "profiling.enable_profiling": "profiler.enable_profiling",
    "dataloader": "[data]",
    "validation": "[validator]",
    "experimental": "[parallelism]",
    "job": "dump_folder and [debug]",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is alike."""
    spelled = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def where_key_belongs(path: str) -> str:
    """What to do about an unknown key, as the end of a message."""
    if path in _MOVED:
        return f"it is {_MOVED[path]} here"
    section, _, name = path.rpartition(".")
    elsewhere = [key.section for key in keys().values() if key.name == name]
    if 0 < len(elsewhere) <= 2:
        top = "at the top of the file, before any [section]"
        return "it belongs " + " or ".join(f"in [{home}]" if home else top for home in elsewhere)
    members = [key.name for key in keys().values() if key.section == section]
    close = nearest(name, members)
    if close:
        return f"did you mean {section}.{close}?" if section else f"did you mean {close}?"
    close = nearest(path, keys())
    if close:
        return f"did you mean {close}?"
    if not section:
        return "titan-relay train --help lists the options and all keys"
    return f"known in [{section}]: {', '.join(members)}"


def where_section_belongs(path: str) -> str:
    """What to do about an unknown section, as the end of a message."""
    if path in _MOVED:
        return f"it is {_MOVED[path]} here"
    named = [section for section in sections() if section]
    same_end = [section for section in named if section.rpartition(".")[2] == path]
    close = same_end[0] if same_end else nearest(path, named)
    if close:
        return f"did you mean [{close}]?"
    top_level = [f"[{section}]" for section in named if "." not in section]
    return f"known: {', '.join(top_level)}"
