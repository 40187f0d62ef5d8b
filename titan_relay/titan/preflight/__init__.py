"""What is found out before anything is built: device, weights, tokenizer, checkpoints.

And before the first step, once ranks can talk to each other, whether they share a folder.
"""
