"""What torchtitan's blocks keep for backward, and the choice of it."""
