"""The only package that imports torchtitan: models, trainer, metrics, plans.

Importing it adapts torchtitan to a machine without an accelerator (see `device`): torchtitan binds
its device by value in many modules, so that has to happen before any of them is imported.
"""

from titan_relay.titan.device import adapt_torchtitan

adapt_torchtitan()
