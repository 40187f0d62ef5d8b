"""The tests of kernels and of the loop-back ring, in several pytest processes side by side.

    python scripts/gpu_tests.py                                  what scripts/gpu_check.sh runs
    python scripts/gpu_tests.py --processes 2 tests/kernels/test_routing.py

On a GPU nearly all of their time is the compiler's, which a process uses for one kernel after
another; compiled kernels are shared by Triton's cache. Needs pytest and none of its plugins.
Without a GPU the same tests run by Triton's interpreter. Exit code 1: a test failed, or a process.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/kernels", "tests/scripts/test_check_ring.py")
# Tests of scripts that start processes of their own.
LEFT_OUT = (
    "test_bench_cpu_experts.py",
    "test_bench_kernels.py",
    "test_check_kernels.py",
    "test_gpu_tests.py",
)
# Not the project's settings, which name plugins that may not be there.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
    *("--rootdir", str(ROOT), "-m", "not slow"),
)
IMPORTED = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "scripts"))
MOST_PROCESSES = 16
NO_TESTS_COLLECTED = 5  # pytest's exit code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests", nargs="*", help=f"this project's files or folders (default {' '.join(TESTS)})"
    )
    parser.add_argument("--processes", type=int, help="default: one for each core, 16 at most")
    args = parser.parse_args(argv)
    processes = args.processes or min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if processes < 1:
        parser.error(f"--processes {processes}: must be at least 1")
    tests = collected(args.tests or TESTS)
    print(f"{len(tests)} tests, {processes} processes", flush=True)
    # Neighbours take about as long as each other, so each process has every n-th.
    shares = [tests[first::processes] for first in range(processes)]
    return run([share for share in shares if share])


def collected(paths: tuple[str, ...] | list[str]) -> list[str]:
    """Ids of all tests in ``paths``."""
    left_out = [f"--ignore={ROOT / 'tests' / 'kernels' / name}" for name in LEFT_OUT]
    command = [*PYTEST, "--collect-only", *left_out, *paths]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode not in (0, NO_TESTS_COLLECTED):
        sys.exit(f"error: tests cannot be collected:\n{done.stdout}{done.stderr}")
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if not tests:
        sys.exit(f"error: there are no tests in {' '.join(paths)}")
    return tests


def run(shares: list[list[str]]) -> int:
    """Run each share in a process of its own; print what failed, and all counts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as ending:
        children, outputs = [], []
        for share in shares:
            outputs.append(ending.enter_context(tempfile.TemporaryFile("w+")))
            children.append(
                subprocess.Popen(
                    [*PYTEST, "-rfE", *share],
                    cwd=ROOT,
                    env=environment(),
                    stdout=outputs[-1],
                    stderr=subprocess.STDOUT,
                )
            )
            ending.callback(children[-1].kill)
        statuses = [child.wait() for child in children]
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().strip())
    for number, (status, text) in enumerate(zip(statuses, texts, strict=True), 1):
        if status:
            print(f"process {number} of {len(shares)}, exit code {status}:\n{text}")
    print(summary(texts))
    return 1 if any(statuses) else 0


def environment() -> dict[str, str]:
    """Tests import this folder's packages, installed or not."""
    return {**os.environ, "PYTHONPATH": IMPORTED}


def summary(texts: list[str]) -> str:
    """The sum of all processes' counts, such as "170 passed, 2 skipped"."""
    counts: dict[str, int] = {}
    for text in texts:
        last_line = text.rpartition("\n")[2]
        for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last_line):
            counts[what] = counts.get(what, 0) + int(number)
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
