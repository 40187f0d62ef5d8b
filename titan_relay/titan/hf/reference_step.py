"""What `transformers` computes for a folder: logits, loss and the gradient of every parameter."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from titan_relay.titan.hf.errors import HfError

GRADIENTS, OUTPUTS = "gradients.safetensors", "outputs.safetensors"


def reference_step(hf_dir: Path, tokens_BS: torch.Tensor, out: Path) -> None:
    """Run one forward and backward in float32 on CPU, in evaluation mode, and write the results.

    Args:
        tokens_BS: ids; the last of each row is a label only.
        out: gets the gradients under the names of the folder's tensors, the logits `(B, S - 1, V)`
            and the mean cross-entropy over all labels.

    Raises:
        HfError: `transformers` is not there, or cannot load the folder.
    """
    try:
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise HfError(f"transformers is needed to compare with: {error}") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(
            hf_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise HfError(f"transformers cannot load {hf_dir}: {error}") from error
    model.eval()
    logits_BLV = model(input_ids=tokens_BS[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
    loss.backward()
    # transformers keeps experts together in memory and apart in files; saving takes them apart,
    # and that is linear, so gradients go the same way as weights.
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }
    gradients = revert_weight_conversion(model, gradients)
    save_file({name: each.contiguous() for name, each in gradients.items()}, out / GRADIENTS)
    outputs = {"logits": logits_BLV.detach().contiguous(), "loss": loss.detach()}
    save_file(outputs, out / OUTPUTS)
