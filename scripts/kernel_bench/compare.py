"""Measure one layer shape: ceilings, the unfused form, the relay's form, each op."""

from collections.abc import Sequence

import torch

from kernel_bench import fused, unfused
from kernel_bench.layer import RelayLayer
from kernel_bench.problem import Problem
from kernel_bench.report import Row
from kernel_bench.timing import Timer, copy_bytes_per_s, dense_flops_per_s

# Products that a direction cannot do without: gate, up and down; and in the backward the first two
# again, u, two of dx and three of weight gradients. Recompute is counted as work.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 3, 8
# Both forms round to 8 (bfloat16) or 11 bits between products, at other places.
_AGREE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Speeds:
    """The ceilings, and rows of the table relative to them."""

    def __init__(self, problem: Problem, timer: Timer) -> None:
        _, expert_dim, dim = problem.weights.w1_gFD.shape
        dtype = problem.x_TD.dtype
        self.dense = dense_flops_per_s(timer, dtype, problem.num_rows, (dim, 3 * expert_dim))
        self.copy = copy_bytes_per_s(timer)

    def rows(self) -> list[Row]:
        return [
            Row(
                "one dense product, the ceiling", tflops_per_s=self.dense / 1e12, ceiling_share=1.0
            ),
            Row("a copy, of 1 s", ms=1e3, least_gb=self.copy / 1e9, copy_share=1.0),
        ]

    def row(
        self, name: str, ms: float, flops: int, least_bytes: int = 0, unfused_ms: float = 0.0,
        error: float = 0.0,
    ) -> Row:  # fmt: skip
        per_s = 1e3 / ms
        return Row(
            name,
            ms,
            flops * per_s / 1e12,
            flops * per_s / self.dense,
            least_bytes / 1e9,
            least_bytes * per_s / self.copy,
            unfused_ms / ms,
            error,
        )


def measure_layer(
    problem: Problem, timer: Timer, kernels: str, rows_per_step: Sequence[int]
) -> list[Row]:
    """Every line of the layer's table.

    Raises:
        ValueError: the two forms differ by more than rounding.
    """
    speeds = Speeds(problem, timer)
    forward_flops = _FORWARD_PRODUCTS * problem.product_flops
    backward_flops = _BACKWARD_PRODUCTS * problem.product_flops
    result = speeds.rows()
    expected = [unfused.forward(problem), *unfused.backward(problem)]
    forward_ms = timer.ms(lambda: unfused.forward(problem))
    backward_ms = timer.ms(lambda: unfused.backward(problem))
    result.append(speeds.row("unfused forward", forward_ms, forward_flops))
    result.append(speeds.row("unfused backward", backward_ms, backward_flops))
    result.append(_with_kept_activations(problem, timer, speeds))
    for deterministic in (False, True):
        for max_rows in rows_per_step:
            layer = RelayLayer(problem, kernels, deterministic=deterministic, max_rows=max_rows)
            error = largest_error([layer.forward(), *layer.backward()], expected)
            _check(error, problem.x_TD.dtype)
            name = f", {'deterministic, ' if deterministic else ''}steps of {max_rows} rows"
            ms = timer.ms(layer.forward)
            result.append(
                speeds.row(f"relay forward{name}", ms, forward_flops, 0, forward_ms, error)
            )
            ms = timer.ms(layer.backward)
            result.append(speeds.row(f"relay backward{name}", ms, backward_flops, 0, backward_ms))
            del layer
    del expected
    for op in fused.ops(problem):
        fused_ms, unfused_ms = timer.ms(op.run), timer.ms(op.unfused)
        name = f"op {op.name}"
        result.append(speeds.row(name, fused_ms, op.flops, op.least_bytes, unfused_ms))
    return result


def _with_kept_activations(problem: Problem, timer: Timer, speeds: Speeds) -> Row:
    kept = unfused.projections(problem)
    ms = timer.ms(lambda: unfused.backward(problem, kept))
    flops = (_BACKWARD_PRODUCTS - 2) * problem.product_flops
    return speeds.row("unfused backward, activations kept", ms, flops)


def largest_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of any result, its largest difference over its largest value."""
    errors = [
        ((mine.float() - truth.float()).abs().max() / truth.abs().max()).item()
        for mine, truth in zip(actual, expected, strict=True)
    ]
    # A NaN compares false with everything; it must not be the largest by being lost.
    return max(errors, key=lambda error: (error != error, error))


def _check(error: float, dtype: torch.dtype) -> None:
    if not error <= _AGREE[dtype]:
        raise ValueError(
            f"fused and unfused results differ by {error:.1e} of the largest value, "
            f"more than {_AGREE[dtype]}"
        )
