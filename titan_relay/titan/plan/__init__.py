"""Planning: the trainer's own step on fake tensors, and what it says about a run's memory."""
