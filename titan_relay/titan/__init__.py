"""The only package that imports torchtitan: trainer, model families, CPU support, data, metrics."""
