"""GGUF files, as llama.cpp reads them, as checkpoints of the Hugging Face kind."""
