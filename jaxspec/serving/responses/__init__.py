"""`/v1/responses`: OpenAI's API whose answers are lists of items, and are kept for a while."""
