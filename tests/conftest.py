"""Without a CUDA device the Triton kernels run in Triton's interpreter, in the same tests.

Triton reads the variable when it is first imported, which other tests do as well: so it is set
here, before any test module is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
