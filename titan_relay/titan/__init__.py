"""The only package that imports torchtitan: trainer, model families, CPU support, data, metrics.

Importing it adapts torchtitan to a machine without an accelerator (see `cpu`): torchtitan binds
its device by value in many modules, so that has to happen before any of them is imported.
"""

from titan_relay.titan import cpu

cpu.adapt_torchtitan()
