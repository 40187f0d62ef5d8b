"""Parts of ``scripts/bench_layer.py``: settings, the layers compared, and how they are measured."""
