"""Training: from a configuration to torchtitan's trainer, parallelisms, data and checkpoints."""
