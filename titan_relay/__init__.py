"""Titan Relay: Mixture-of-Experts pretraining whose expert parallelism is a ring."""

__version__ = "0.1.0"
