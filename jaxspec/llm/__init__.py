"""Text in, text out: LLM, AsyncLLM, replicas, tokenizers, files of prompts."""
