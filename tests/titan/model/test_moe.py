"""Every MoE layer knows its place in the model, for its draws and for its messages."""

from dataclasses import replace

from tests.titan.recompute.blocks import relay_model
from tests.titan.tiny import TINY
from titan_relay.titan.model.balance_hook import moe_layers


def test_a_built_model_has_set_every_layers_place() -> None:
    model = relay_model(replace(TINY, num_layers=3), None)
    places = [(moe.layer, moe.routed_experts.options.layer) for _, moe in moe_layers([model])]
    assert places == [(0, "0"), (1, "1"), (2, "2")]
