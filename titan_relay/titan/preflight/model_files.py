"""Whether the weights and the tokenizer that a run starts from are its model's, and whether it can
export its own weights; asked before anything is built.
"""

from __future__ import annotations

from pathlib import Path

import fsspec
import torch
from torchtitan.tools.logging import logger

from titan_relay.config import Origins, RunConfig
from titan_relay.data import load_tokenizer
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.export import exported_config
from titan_relay.titan.hf.from_hf import open_checked
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.to_hf import check_tensors
from titan_relay.titan.train.checkpoint import export_assets


def check_initial_weights(run: RunConfig, origins: Origins) -> None:
    """Refuse `initial_load_path` if it lacks the model's tensors, or is of another model.

    Of a path on other machines only the way there is looked at.

    Raises:
        ConfigError: one line with the first difference; all of them are logged.
    """
    path = run.checkpoint.initial_load_path
    if not run.checkpoint.enable or path is None:
        return
    try:
        if "://" in path:
            fsspec.core.url_to_fs(path)
        elif run.checkpoint.initial_load_in_hf:
            open_checked(Path(path), run.model)
        else:
            check_tensors(NameMap(run.model), PartsReader(Path(path)), Path(path), every=True)
    except (HfError, ImportError, ValueError) as error:
        raise origins.error("checkpoint.initial_load_path", path, str(error)) from error


def check_export(run: RunConfig, origins: Origins) -> None:
    """Refuse `last_save_in_hf` for a model that Hugging Face's class cannot compute.

    Raises:
        ConfigError: one line with the key.
    """
    if not run.checkpoint.enable or not run.checkpoint.last_save_in_hf:
        return
    try:
        dtype = getattr(torch, run.checkpoint.export_dtype)
        exported_config(run.model, export_assets(run), dtype)
    except HfError as error:
        raise origins.error("checkpoint.last_save_in_hf", True, str(error)) from error
    biases = [e.name for e in NameMap(run.model).entries if not e.parts and e.is_buffer]
    if biases:
        logger.warning(
            "checkpoint.last_save_in_hf: Hugging Face's class has no balancing bias, so the export "
            "leaves out what model.moe.load_balance_coeff learns, and some tokens will go to other "
            "experts there; set it to 0 (and aux_loss_coeff above 0) to export the same function"
        )


def check_tokenizer(run: RunConfig, origins: Origins) -> None:
    """Refuse a vocabulary larger than the embedding; say how much of it a smaller one uses.

    Raises:
        ConfigError: one line with the smallest vocab_size that fits.
        DataError: the tokenizer cannot be read.
    """
    num_tokens, num_rows = load_tokenizer(run.tokenizer).vocab_size, run.model.vocab_size
    if num_tokens > num_rows:
        raise origins.error(
            "model.vocab_size",
            num_rows,
            f"the tokenizer {run.tokenizer.path} has {num_tokens} tokens; give at least that",
        )
    if num_tokens < num_rows:
        logger.info(
            f"The tokenizer has {num_tokens} tokens, the model's embedding {num_rows} rows: "
            f"{num_rows - num_tokens} rows are never used"
        )
