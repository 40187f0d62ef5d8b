"""What is measured of a layer: memory, time, error and traffic, each on the largest rank.

- ``saved_bytes``: live after the forward, beyond parameters, inputs and the output.
- ``peak_bytes``: most live during forward and backward, beyond parameters, inputs and parameters'
  gradients. Tensor storages are counted, not an allocator's blocks.
- ``max_rel_err``: the largest difference over the largest value, of output, input gradient, score
  gradient and weight gradients, against float64.
- ``sent_bytes``: leaving the rank in forward and backward. ``wait_ms``: the process blocked on it.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from layer_bench.layer import Layer, grads_of
from layer_bench.setting import Setting
from layer_check.dense_truth import RankData, Tensors, expected_results, relative_error, share_of
from titan_relay.measure import LiveBytes
from titan_relay.moe import relay_ring


def leaves_of(layer: Layer, inputs: RankData) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_TD`` and ``scores_TK`` for a pass that makes all gradients anew."""
    for parameter in layer.parameters:
        parameter.grad = None
    return inputs.x_TD.detach().requires_grad_(), inputs.scores_TK.detach().requires_grad_()


def run_pass(layer: Layer, inputs: RankData) -> Tensors:
    """Forward and backward: the output, and the gradients of tokens and scores."""
    x_TD, scores_TK = leaves_of(layer, inputs)
    out_TD = layer.forward(x_TD, scores_TK, inputs.ids_TK)
    out_TD.backward(inputs.dout_TD)
    return [out_TD.detach(), *grads_of([x_TD, scores_TK])]


def measure_memory(layer: Layer, inputs: RankData) -> dict[str, int]:
    """``saved_bytes`` and ``peak_bytes`` of this rank."""
    x_TD, scores_TK = leaves_of(layer, inputs)
    gc.collect()
    with LiveBytes(keep_events=True) as tracker:
        out_TD = layer.forward(x_TD, scores_TK, inputs.ids_TK)
        saved_bytes = tracker.live_bytes - out_TD.untyped_storage().nbytes()
        out_TD.backward(inputs.dout_TD)
    peak_bytes = tracker.peak_bytes_without(*grads_of(layer.parameters))
    return {"saved_bytes": saved_bytes, "peak_bytes": peak_bytes}


def expected_of(setting: Setting, inputs: RankData, group: dist.ProcessGroup) -> Tensors:
    """What this rank must get of output, input, score and weight gradients, in float64.

    Each rank computes its own tokens with all experts.
    """
    expected = expected_results(setting.dense_layer(), [inputs])
    for total in expected.dweights:
        dist.all_reduce(total, group=group)
    mine = share_of(expected.dweights, dist.get_rank(group), setting.ep)
    return [*expected.out, *expected.dx, *expected.dscores, *mine]


def measure_error(layer: Layer, inputs: RankData, expected: Tensors) -> float:
    actual = [*run_pass(layer, inputs), *layer.weight_gradients()]
    return max(relative_error(*pair) for pair in zip(actual, expected, strict=True))


def measure_times(
    layers: Sequence[Layer], inputs: RankData, iterations: int, warmup: int
) -> dict[str, list[float]]:
    """Milliseconds of every iteration on this rank, the implementations taking turns."""
    times: dict[str, list[float]] = {layer.name: [] for layer in layers}
    for iteration in range(warmup + iterations):
        for layer in layers:
            _synchronize(inputs)
            dist.barrier()
            begin_s = time.perf_counter()
            run_pass(layer, inputs)
            _synchronize(inputs)
            if iteration >= warmup:
                times[layer.name].append(1e3 * (time.perf_counter() - begin_s))
    return times


def measure_traffic(layer: Layer, inputs: RankData) -> dict[str, float]:
    """``sent_bytes`` and ``wait_ms`` of one pass on this rank."""
    dist.barrier()
    if layer.relay_group is not None:
        telemetry = relay_ring(layer.relay_group).telemetry
        telemetry.take()
        run_pass(layer, inputs)
        counts = telemetry.take().values()
        return {
            "sent_bytes": sum(count.sent_bytes for count in counts),
            "wait_ms": 1e3 * sum(count.wait_seconds for count in counts),
        }
    with CollectiveCounter() as counter:
        run_pass(layer, inputs)
    return {"sent_bytes": counter.sent_bytes, "wait_ms": 1e3 * counter.wait_seconds}


class CollectiveCounter(TorchDispatchMode):
    """Counts what all-to-alls send to other ranks, and the time blocked in them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0
        self.wait_seconds = 0.0
        self._wait = dist.Work.wait

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.name()
        if not name.startswith(("c10d::", "_c10d_functional::")):
            return func(*args, **(kwargs or {}))
        if name == "c10d::alltoall_base_":
            _, tensor, _, _, splits, *_ = args
            self._count(tensor, splits)
        elif name == "_c10d_functional::all_to_all_single":
            tensor, _, splits, *_ = args
            self._count(tensor, splits)
        return self._timed(func, *args, **(kwargs or {}))

    def _timed(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.wait_seconds += time.perf_counter() - begin_s

    def _count(self, tensor: torch.Tensor, splits: Sequence[int]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = list(splits) or [tensor.shape[0] // size] * size
        row_bytes = tensor.nbytes // max(1, sum(rows))
        self.sent_bytes += row_bytes * (sum(rows) - rows[rank])

    def __enter__(self) -> "CollectiveCounter":
        counter, wait = self, self._wait

        def timed_wait(work: dist.Work, *args: Any) -> Any:
            return counter._timed(wait, work, *args)

        dist.Work.wait = timed_wait  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        dist.Work.wait = self._wait  # type: ignore[method-assign]


def _synchronize(inputs: RankData) -> None:
    if inputs.x_TD.is_cuda:
        torch.cuda.synchronize()
