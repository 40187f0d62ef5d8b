"""What is found out before anything is built: device, weights, tokenizer, checkpoints."""
