"""A layer's forward and backward on virtual ranks, below the registered op."""

from relay_kernels import ExpertWeights, SwiGLU
from tests.moe.parity import local_weights
from tests.support.dense_reference import expected_results, relative_error
from tests.support.moe_cases import MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions
from titan_relay.moe.call import RelayCall, Wants, layer_shape
from titan_relay.moe.layer import layer_backward, layer_forward
from titan_relay.moe.routing import sort_rows
from titan_relay.moe.shapes import token_slices


def run_virtual(case: MoeCase, options: RelayOptions, world: VirtualWorld) -> list[dict]:
    """Every rank's results, and the clock after forward and after backward."""
    ranks = range(case.num_ranks)
    inputs = [case.data(rank) for rank in ranks]
    experts = [
        ExpertWeights(*(weight.detach() for weight in local_weights(case, rank))) for rank in ranks
    ]
    for data, weights in zip(inputs, experts, strict=True):
        world.protect([data.x_TD, data.scores_TK, data.dout_TD, *weights.tensors()])

    def on_rank(rank, ring):
        data, weights = inputs[rank], experts[rank]
        shape = layer_shape(data.x_TD, data.scores_TK, weights, case.num_ranks, options)
        slices = token_slices(shape.num_tokens, case.num_ranks, options)
        rows_N, counts = sort_rows(data.ids_TK, case.num_experts, slices)
        world.protect([rows_N])
        args = (data.x_TD, data.scores_TK, rows_N, counts, weights)
        forward = RelayCall(shape, options, SwiGLU(), ring, "forward")
        out_TD = layer_forward(forward, *args)
        forward_s = world.clock_s[rank]
        backward = RelayCall(shape, options, SwiGLU(), ring, "backward")
        gradients = layer_backward(backward, Wants(True, True, True), data.dout_TD, *args)
        return {
            "out": out_TD,
            "dx": gradients.dx_TD,
            "dscores": gradients.dscores_TK,
            "dweights": gradients.weights.tensors(),
            "forward_s": forward_s,
            "backward_s": world.clock_s[rank] - forward_s,
        }

    return world.run(on_rank)


def virtual_errors(case: MoeCase, options: RelayOptions, world: VirtualWorld) -> dict[str, float]:
    """The largest relative error over ranks, by result."""
    results = run_virtual(case, options, world)
    expected = expected_results(case.dense_layer(), [case.data(r) for r in range(case.num_ranks)])
    errors: dict[str, float] = {}
    per_rank = case.num_experts // case.num_ranks

    def note(name, actual, wanted):
        errors[name] = max(errors.get(name, 0.0), relative_error(actual, wanted))

    for rank, result in enumerate(results):
        for name in ("out", "dx", "dscores"):
            note(name, result[name], getattr(expected, name)[rank])
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        for index, actual in enumerate(result["dweights"]):
            note(f"dweights[{index}]", actual, expected.dweights[index][mine])
    return errors
