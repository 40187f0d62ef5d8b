"""Which kernels a layer and its warm-up would have compiled, on a machine without a GPU.

Run as a program, because Triton must be imported as for a GPU, not with its interpreter. Launches
are recorded instead of made, so results mean nothing.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch

import check_ring
from kernel_check.registry import variant_of
from relay_kernels import choice, route_rows
from relay_kernels.triton import launch, launch_routing
from titan_relay.moe import RelayOptions
from titan_relay.moe.warm_up import warm_up

ARCH, CPU = "sm_90", torch.device("cpu")


def record(recorded: set[tuple]) -> None:
    """From now on, note what would be launched on ``ARCH``."""

    def note(self: launch.Launch, grid: tuple[int, ...]) -> None:
        name, signature, constexprs, *rest = variant_of(self, "", needs_tensor_cores=False).key
        recorded.add((name, *signature, *constexprs, *rest))

    launch.Launch.run = note
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
    launch.arch_of = lambda _: ARCH
    choice.why_not_triton = lambda *_: ""
    by_kernels = launch_routing.route_rows

    def note_and_sort(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        by_kernels(*args)
        return route_rows(*args, "torch")  # a layer cannot work on rows that are none

    launch_routing.route_rows = note_and_sort


def main() -> int:
    recorded: set[tuple] = set()
    record(recorded)
    for circulate in ("experts", "tokens"):
        for deterministic in (False, True):
            # Slices of 3 and 2 experts; steps and blocks of no even number of rows.
            options = RelayOptions(
                circulate=circulate, num_slices=2, max_rows_per_step=37, kernels="triton",
                deterministic=deterministic,
            )  # fmt: skip
            sizes = ["--tokens", "67", "--dim", "64", "--expert-dim", "32", "--experts", "10"]
            arguments = [*sizes, "--device", "cpu", "--dtype", "bfloat16", "--top-k", "3"]
            layer = check_ring.Layer(check_ring.setting_of(check_ring.parse(arguments), 2), options)
            recorded.clear()
            warm_up(layer.call(0, None, "forward").shape, options, CPU)
            warmed = set(recorded)
            recorded.clear()
            layer.run()
            for missing in recorded - warmed:
                print(f"{circulate}, deterministic = {deterministic}: not warmed up: {missing}")
                for near in (each for each in warmed if each[0] == missing[0]):
                    print(f"    differs from one that was in {set(missing) ^ set(near)}")
            if recorded - warmed:
                return 1
            print(f"{circulate}, deterministic = {deterministic}: {len(warmed)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
