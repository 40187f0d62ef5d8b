"""The warm-up compiles every kernel that a layer launches, so that no step waits for a compiler."""

import contextlib
from dataclasses import replace

import pytest
import torch

import check_ring
from layer_bench.setting import Setting
from titan_relay.moe import LayerShape, RelayOptions, warm_up

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = LayerShape(1, 16, dim=16, expert_dim=16, num_experts=2, top_k=1, dtype=torch.float32)
# Slices of 2 experts and of 1; steps and blocks of odd numbers of rows. An expert has 49 rows, and
# 25 of a block of tokens: few enough for another shape class.
SIZES = {"tokens": 147, "dim": 32, "expert-dim": 16, "experts": 6, "top-k": 2, "dtype": "bfloat16"}


class Launches:
    """What the kernels are launched with that a compilation depends on."""

    def __init__(self):
        from relay_kernels.triton import (
            backward_hidden,
            backward_products,
            forward,
            routing,
            sum_rows,
        )

        modules = (backward_hidden, backward_products, forward, routing, sum_rows)
        self._kernels = {
            (module.__name__, name): kernel
            for module in modules
            for name, kernel in vars(module).items()
            if name.endswith("_kernel")
        }
        self.seen = set()

    @contextlib.contextmanager
    def recorded(self):
        """The launches inside, by Triton's own hook."""
        self.seen.clear()
        hooks = [(kernel, self._hook(kernel)) for kernel in self._kernels.values()]
        for kernel, hook in hooks:
            kernel.add_pre_run_hook(hook)
        try:
            yield
        finally:
            for kernel, hook in hooks:
                kernel.pre_run_hooks.remove(hook)

    def _hook(self, kernel):
        from triton.runtime.jit import JITFunction

        from kernel_check.registry import variant_of
        from relay_kernels.triton.launch import Launch
        from relay_kernels.tuning import TunedConfig

        # The interpreter's functions do not say what is specialised on.
        if not isinstance(kernel, JITFunction):
            kernel = JITFunction(kernel.fn, **kernel.kwargs)

        def note(*_, **given):
            launch = Launch(kernel, given, TunedConfig({}), (1,))
            name, signature, constants, *_ = variant_of(launch, "", needs_tensor_cores=False).key
            self.seen.add((name, *signature, *constants))

        return note


@contextlib.contextmanager
def told_apart():
    """Configurations of which each shape class has its own, as on a device."""
    from relay_kernels.tuning import arch_of, configurations, trial

    arch = arch_of(DEVICE)
    with contextlib.ExitStack() as stack:
        for (kernel, _, width), config in configurations(arch).items():
            if width == "16bit" and "GROUP_M" in config.constexprs:
                other = replace(config, constexprs={**config.constexprs, "GROUP_M": 3})
                stack.enter_context(trial(kernel, arch, "few_rows", torch.bfloat16, other))
        yield


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_every_kernel_of_a_layer_is_warmed_up(circulate, deterministic):
    pytest.importorskip("triton", reason="triton is for Linux")
    options = RelayOptions(
        circulate=circulate, num_slices=2, max_rows_per_step=101, kernels="triton",
        deterministic=deterministic,
    )  # fmt: skip
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    setting = Setting.of(check_ring.parse([*sizes, "--device", DEVICE.type]), 2)
    layer, launches = check_ring.Layer(setting, options), Launches()
    with told_apart(), launches.recorded():
        warm_up(layer.call(0, None, "forward").shape, options, DEVICE)
        warmed = set(launches.seen)
        launches.seen.clear()
        layer.run()
    assert len(launches.seen) >= 9, "not every kernel was seen"
    for missing in launches.seen - warmed:
        near = [set(missing) ^ set(each) for each in warmed if each[0] == missing[0]]
        pytest.fail(f"not warmed up: {missing}; differs from those that were in {near}")


def test_plain_pytorch_has_nothing_to_compile():
    assert warm_up(SHAPE, RelayOptions(), CPU) == 0.0


def test_time_is_reported():
    assert warm_up(SHAPE, RelayOptions(kernels="triton"), CPU) > 0.0
