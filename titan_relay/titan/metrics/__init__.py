"""What a run reports: the console's line, curves, memory and speed."""
