"""Entry point: `torchrun --nproc_per_node N train.py --config FILE.toml [--section.key ...]`."""

import sys

from titan_relay.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
