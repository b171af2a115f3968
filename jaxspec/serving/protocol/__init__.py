"""What clients send and get: pydantic models in OpenAI's shape, with vLLM's further fields."""
