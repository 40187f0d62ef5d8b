"""The Triton kernels and what launches them; imported only where they run.

This package's modules import triton, so nothing outside imports them before it is known to be
needed: ``relay_kernels`` itself works without triton.
"""
