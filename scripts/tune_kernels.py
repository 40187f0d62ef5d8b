"""Search faster configurations for this GPU's kernels and write them as a configuration file.

    python scripts/tune_kernels.py --out kernels/relay_kernels/configs/sm_90.toml

For every kernel and shape class, one layer of a published model that is of that class. Begins with
the present configuration, so a table is only ever replaced by a faster one; tables for what was not
tuned stay. Afterwards run scripts/check_kernels.py, which refuses what spills, and the tests.
``--interpret`` tries the script out without a GPU; what it then writes means nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_bench.timing import Timer, kernels_can_run
from layer_bench.setting import PRESETS
from titan_relay.commands.arguments import at_least_1, file_to_write, script_parser
from titan_relay.local_ranks import say

# A layer of each shape class: its preset and tokens.
LAYERS = {
    "narrow": ("qwen3-30b-a3b", 16384),
    "wide": ("mixtral-8x7b", 16384),
    "few_rows": ("qwen3-30b-a3b", 512),
}
TINY = {"few_rows": ((16, 32, 2, 1), 20)}
DTYPE, WIDTH = torch.bfloat16, "16bit"
TINY_CHOICES: dict[str, Sequence[int | bool]] = {"GROUP_M": (2, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not kernels_can_run("tune_kernels", args.interpret):
        return 2
    found = tune(args)
    device_name = "no device" if args.interpret else torch.cuda.get_device_name()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(file_text(found, device_name))
    print(f"{args.out}: {len(found)} tables tuned; now run scripts/check_kernels.py")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--out", type=file_to_write, required=True, metavar="FILE", help="a TOML file to write"
    )
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--shape-class", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--iters", type=at_least_1, default=10)
    parser.add_argument("--interpret", action="store_true", help="try out without a GPU")
    return parser.parse_args(argv)


def tune(args: argparse.Namespace) -> dict[tuple[str, str, str], Any]:
    """What is faster than the present table of its (kernel, class, width)."""
    # These import triton, so only now.
    from kernel_bench import fused
    from kernel_bench.problem import make_problem
    from relay_kernels.tuning import shape_class

    device = torch.device("cpu" if args.interpret else "cuda")
    timer = Timer(device, 1 if args.interpret else args.iters, 0 if args.interpret else 2)
    found: dict[tuple[str, str, str], Any] = {}
    for of_class in TINY if args.interpret else args.shape_class:
        preset, tokens = LAYERS[of_class]
        shape = PRESETS[preset]
        if args.interpret:
            shape, tokens = TINY[of_class]
        problem = make_problem(preset, shape, tokens, 0.0, DTYPE, device)
        assert shape_class(problem.rows_per_expert, *shape[:2], DTYPE) == of_class
        ops = fused.ops(problem)
        known = sorted({kernel for op in ops for kernel in op.tuned})
        for name in args.kernel or ():
            if name not in known:
                say(f"error: --kernel {name}: must be one of {', '.join(known)}")
                sys.exit(2)
        for op in ops:
            for kernel in op.tuned:
                if not args.kernel or kernel in args.kernel:
                    found |= _tune_one(kernel, of_class, op.run, timer, args)
    return found


def _tune_one(
    kernel: str, of_class: str, run: Callable[[], object], timer: Any, args: argparse.Namespace
) -> dict[tuple[str, str, str], Any]:
    from kernel_bench.search import CHOICES, search
    from relay_kernels.tuning import arch_of, trial, tuned_config

    arch = arch_of(timer.device)

    def measure(config: Any) -> float | None:
        with trial(kernel, arch, of_class, DTYPE, config):
            try:
                return timer.ms(run)
            except Exception as error:  # as many kinds as a compiler has passes
                say(f"  {config}: {type(error).__name__}")
                return None

    begin_s = time.perf_counter()
    begin = tuned_config(kernel, arch, of_class, DTYPE)
    best = search(begin, measure, TINY_CHOICES if args.interpret else CHOICES)
    say(
        f"{kernel} {of_class}: {best.begin_ms:.3f} ms to {best.best_ms:.3f} ms "
        f"after {time.perf_counter() - begin_s:.0f} s of search"
    )
    return {} if best.config == begin else {(kernel, of_class, WIDTH): best.config}


def file_text(found: dict[tuple[str, str, str], Any], device_name: str) -> str:
    """The device's configuration file with the tables found in the place of its own."""
    from relay_kernels.tuning import arch_of, configurations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables = {**configurations(arch_of(device)), **found}
    lines = [f"# scripts/tune_kernels.py on {device_name} set {len(found)} of these tables."]
    for key, config in tables.items():
        tuned = " # tuned" if key in found else ""
        lines += ["", f"[{'.'.join(key)}]{tuned}"]
        values = {**config.constexprs, "num_warps": config.num_warps}
        values["num_stages"] = config.num_stages
        values["programs_per_processor"] = config.programs_per_processor
        lines += [f"{name} = {str(value).lower()}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
