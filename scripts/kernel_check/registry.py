"""Every kernel in every tuned configuration, as something to compile for a chip that is not here.

``variants(arch, dtype)`` builds them from the very launches that training makes, at the shapes of
real layers, so that what is checked is what runs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_check.example_layers import EXAMPLE_LAYERS, ExampleLayer
from kernel_check.variant import KernelVariant
from relay_kernels.triton.launch import Launch, config_for, narrow_config
from relay_kernels.triton.launch_backward import (
    bias_gradient_launches,
    dw2_launch,
    dw13_launch,
    dx_launch,
    hidden_backward_launch,
    score_gradients_launch,
    score_parts,
)
from relay_kernels.triton.launch_forward import down_launch, sum_rows_launch, up_gate_launch
from relay_kernels.triton.launch_routing import routing_launch
from relay_kernels.triton.routing import count_keys_kernel, place_rows_kernel

_ALIGNMENT = 16  # what Triton takes pointers and sizes to be divisible by when they are
_TRITON_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def variants(arch: str, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """Every kernel for every example layer, without repeating equal ones."""
    seen = set()
    for layer in EXAMPLE_LAYERS:
        launches = (*_experts(layer, arch, dtype), *_routing(layer, arch))
        for name, launch, multiplies in launches:
            # float32 products are exact, in no tensor core
            needs_tensor_cores = multiplies and dtype != torch.float32
            variant = variant_of(launch, name, needs_tensor_cores=needs_tensor_cores)
            if variant.key not in seen:
                seen.add(variant.key)
                yield variant


# A name, the launch, and whether its main loop is a matrix product.
_Named = tuple[str, Launch, bool]


def _experts(layer: ExampleLayer, arch: str, dtype: torch.dtype) -> Iterator[_Named]:
    chunk, weights, hidden = layer.chunk(dtype), layer.weights(dtype), layer.hidden(dtype)
    x_TD, a_RF, ordered = chunk.tokens.x_TD, hidden.a_RF, layer.ordered(dtype)
    assert a_RF is not None
    sums, activation = layer.weights(torch.float32), layer.activation()
    suffix = f"{layer.name}/{dtype}".replace("torch.", "")

    yield f"up_gate/{suffix}", up_gate_launch(a_RF, chunk, weights, activation, arch), True
    for name, into in (("down_scatter", None), ("down_rows", ordered)):
        yield f"{name}/{suffix}", down_launch(x_TD, into, a_RF, chunk, weights, arch), True
    yield f"sum_rows/{suffix}", sum_rows_launch(x_TD, ordered, chunk, arch), False

    config = config_for("hidden_backward", chunk, weights, arch)
    parts_CR = score_parts(chunk, weights, config)
    launch = hidden_backward_launch(hidden, parts_CR, x_TD, chunk, weights, activation, config)
    yield f"hidden_backward/{suffix}", launch, True
    launch = score_gradients_launch(chunk.tokens.scores_N, parts_CR, x_TD, chunk, weights, arch)
    yield f"score_gradients/{suffix}", launch, False
    for name, into in (("dx_scatter", None), ("dx_rows", ordered)):
        yield f"{name}/{suffix}", dx_launch(x_TD, into, hidden, chunk, weights, arch), True
    yield f"dw13/{suffix}", dw13_launch(sums, hidden, chunk, True, arch), True
    yield f"dw2/{suffix}", dw2_launch(sums, hidden, x_TD, chunk, True, arch), True
    for launch in bias_gradient_launches(sums, hidden, x_TD, chunk, True, arch):
        yield f"bias_gradient/{suffix}", launch, False


def _routing(layer: ExampleLayer, arch: str) -> Iterator[_Named]:
    config = narrow_config("route", torch.int32, arch)
    ids_N = torch.empty(layer.num_rows, dtype=torch.int64, device="meta")
    counts = torch.empty(1, dtype=torch.int32, device="meta")
    places = {"rows_ptr": counts, "begins_ptr": counts}
    for num_slices in (1, 2):
        sizes = (layer.num_experts, num_slices, layer.num_rows // num_slices)
        suffix = f"{layer.name}/{num_slices} slices"
        launch = routing_launch(count_keys_kernel, {"counts_ptr": counts}, ids_N, sizes, config)
        yield f"count_keys/{suffix}", launch, False
        launch = routing_launch(place_rows_kernel, places, ids_N, sizes, config)
        yield f"place_rows/{suffix}", launch, False


def variant_of(launch: Launch, name: str, *, needs_tensor_cores: bool) -> KernelVariant:
    """A launch as something to compile. Tensors may be on the meta device.

    Arguments are specialised as Triton's own launcher does it: an integer of 1 becomes a
    constant, and those divisible by 16, like aligned pointers, are known to be.
    """
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible = []
    values = {**launch.values, **launch.config.constexprs}
    for parameter in launch.function.params:
        argument = parameter.name
        value = values[argument]
        specialises = not parameter.do_not_specialize
        is_one = specialises and type(value) is int and value == 1
        if parameter.is_constexpr or value is None or is_one:
            signature[argument], constexprs[argument] = "constexpr", value
            continue
        signature[argument] = _triton_type(value)
        aligns = specialises and not parameter.do_not_specialize_on_alignment
        is_divisible = isinstance(value, int) and value % _ALIGNMENT == 0
        # a fresh allocation is aligned
        if aligns and (is_divisible or isinstance(value, torch.Tensor)):
            divisible.append(argument)
    return KernelVariant(
        name,
        launch.function,
        signature,
        constexprs,
        tuple(divisible),
        launch.config.num_warps,
        launch.config.num_stages,
        needs_tensor_cores,
    )


def _triton_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TRITON_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TRITON_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
