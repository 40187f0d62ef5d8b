"""The only package that imports torchtitan: models, trainer, metrics, plans.

Importing it adapts torchtitan to a machine without an accelerator: torchtitan binds its device by
value in many modules, so that has to happen before any of them is imported.
"""

from titan_relay.titan.device import on_cpu
from titan_relay.titan.private_torchtitan import adapt_torchtitan

adapt_torchtitan(cpu=on_cpu())
