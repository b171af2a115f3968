"""Weights in and out: Hugging Face safetensors, EAGLE and block heads, orbax."""
