"""What transformers computes for a tiny model: a checkpoint, logits, loss and every gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.titan.hf.cases import SEQ_LEN, VOCAB_SIZE, Case
from tests.titan.runs import SEED

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
    with sampled_as_we_do(case):
        out = model.train(case.training)(input_ids=tokens, labels=tokens, use_cache=False)
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

    config = getattr(transformers, case.config)(**copy.deepcopy(case.hf))
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] < SEQ_LEN:
        # transformers 5 takes the short factors whatever the length, as it calls for frequencies
        # without saying the length; its `_compute_longrope_parameters` says when long ones are due.
        rope["short_factor"] = rope["long_factor"]
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


@contextlib.contextmanager
def sampled_as_we_do(case: Case) -> Iterator[None]:
    """Give transformers' SparseMixer the draws that our first step makes, in its order of calls."""
    if case.model["moe.score_func"] != "sparsemixer" or not case.training:
        yield
        return
    exponentials, uniforms, factors = [], [], []
    for gumbel_BLKE, uniform_BLK, noise in _draws(case):
        factors += noise
        for pick in range(2):
            exponentials.append(torch.exp(-gumbel_BLKE[:, :, pick]).flatten(0, 1))
            uniforms.append(uniform_BLK[:, :, pick : pick + 1].flatten(0, 1))

    def exponential_(self: torch.Tensor) -> torch.Tensor:
        return self.copy_(exponentials.pop(0))

    def rand_like(of: torch.Tensor) -> torch.Tensor:
        assert of.shape == uniforms[0].shape
        return uniforms.pop(0)

    def uniform_(self: torch.Tensor, *bounds: float) -> torch.Tensor:
        return self.copy_(factors.pop(0).view_as(self)) if bounds else self

    with (
        mock.patch.object(torch.Tensor, "exponential_", exponential_),
        mock.patch.object(torch, "rand_like", rand_like),
        mock.patch.object(torch.Tensor, "uniform_", uniform_),
    ):
        yield
    assert not exponentials
    assert not uniforms
    assert not factors


def _draws(case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]]:
    from titan_relay.titan.model.jitter import factors
    from titan_relay.titan.model.sparsemixer import SparseMixerRouter
    from titan_relay.titan.train.trainer import token_keys

    keys = token_keys(torch.arange(NUM_ROWS * SEQ_LEN).view(NUM_ROWS, SEQ_LEN), SEED, step=0)
    router = mock.Mock(num_experts=case.model["moe.num_experts"])
    for layer in range(case.model["num_layers"]):
        draws = SparseMixerRouter.draw(router, keys, layer)
        noise = factors(keys.flatten(), case.model["dim"], layer, case.model["moe.input_jitter"])
        yield draws.gumbel_BLKE, draws.uniform_BLK, noise
