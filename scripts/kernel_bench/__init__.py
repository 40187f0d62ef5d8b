"""Parts of ``scripts/bench_kernels.py``: problems, what is compared, how it is timed."""
