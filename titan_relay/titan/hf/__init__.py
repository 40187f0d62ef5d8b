"""Hugging Face folders: reading, checking and writing their weights, configurations and tokenizers,
and comparing a model with what `transformers` computes."""
