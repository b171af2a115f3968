"""Weights in and out: Hugging Face safetensors, EAGLE heads, orbax."""
