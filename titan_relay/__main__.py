"""`python -m titan_relay COMMAND ...`."""

import sys

from titan_relay.cli import main

if __name__ == "__main__":
    sys.exit(main())
