"""Names of weights in Hugging Face's checkpoints and in ours.

torchtitan's adapter for Qwen3 knows how to split stacked experts, sharded or whole; a family adds
the names that Qwen3 has not, and says which parts of a name it spells in another way.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from titan_relay.titan.model.families.decoder import RelayDecoder

# How Mixtral and Phi spell the MoE layer.
BLOCK_SPARSE = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def layer_names(theirs_to_ours: dict[str, str]) -> dict[str, str]:
    """The same pairs with the names of a layer in front."""
    return {f"model.layers.{{}}.{k}": f"layers.{{}}.{v}" for k, v in theirs_to_ours.items()}


QKV_BIASES = layer_names(
    {
        "self_attn.q_proj.bias": "attention.qkv_linear.wq.bias",
        "self_attn.k_proj.bias": "attention.qkv_linear.wk.bias",
        "self_attn.v_proj.bias": "attention.qkv_linear.wv.bias",
    }
)


class Adapter(Qwen3StateDictAdapter):
    """Maps a state dict to Hugging Face's names and back, as torchtitan's checkpoints do.

    names: Hugging Face's names, beyond Qwen3's, to ours; "{}" stands for the layer.
    spelling: parts of a name as Hugging Face spells them for this family and as Qwen3 has them.
    """

    names: ClassVar[dict[str, str]] = {}
    spelling: ClassVar[dict[str, str]] = {}

    def __init__(self, model_config: RelayDecoder.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= self.names

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names to Hugging Face's; experts apart from each other. No copies."""
        theirs = {qwen3: family for family, qwen3 in self.spelling.items()}
        return {_spell(k, theirs): v for k, v in super().to_hf(state_dict).items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's names to ours; experts stacked."""
        return super().from_hf({_spell(k, self.spelling): v for k, v in hf_state_dict.items()})


def _spell(name: str, spelling: dict[str, str]) -> str:
    for old, new in spelling.items():
        name = name.replace(old, new)
    return name
