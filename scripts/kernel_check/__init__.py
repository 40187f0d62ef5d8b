"""Parts of ``scripts/check_kernels.py``: compile without a GPU, read machine code, judge it."""
