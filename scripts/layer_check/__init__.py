"""What proves a relay layer: its slow truth, and rings in one process. Tests use it too."""
