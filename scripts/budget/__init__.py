"""Throughput of several ways to run the same model, all within one budget of live tensor bytes."""
