"""`/v1/messages`: Anthropic's API, whose answers are lists of blocks."""
