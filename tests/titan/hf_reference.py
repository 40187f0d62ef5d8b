"""What transformers computes for a tiny model: a checkpoint, logits, loss and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.titan.hf_cases import SEQ_LEN, VOCAB_SIZE, Case

NUM_ROWS = 2
BIAS_ON_CHOICE = "mlp.gate.e_score_correction_bias"  # a buffer, without a gradient


def write_reference(folder: Path, case: Case, seed: int) -> None:
    """Write random weights, and what transformers makes of them on two rows of random tokens.

    Folders `weights` and `grads` are checkpoints as transformers saves them: a gradient is saved in
    the place of its weight, so it has the weight's name. `outputs.pt` holds tokens `(2, S)`, logits
    `(2, S, vocab)` and the mean loss of predicting each next token.
    """
    torch.manual_seed(seed)
    model = random_model(case)
    model.save_pretrained(folder / "weights")
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS, SEQ_LEN))
    out = model.eval()(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    torch.save(
        {"tokens": tokens, "logits": out.logits.detach(), "loss": out.loss.item()},
        folder / "outputs.pt",
    )
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    model.save_pretrained(folder / "grads")


def random_model(case: Case) -> nn.Module:
    """A model whose every parameter is random: no zero biases, no norms of one, sharp routing."""
    import transformers

    config = getattr(transformers, case.config)(**case.hf)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                param.normal_(1.0, 0.1)
            else:
                is_gate = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
                param.normal_(0.0, 0.3 if is_gate else 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS_ON_CHOICE):
                buffer.normal_(0.0, 0.2)
    return model
