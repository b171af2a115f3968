"""Requests to tokens: compiled programs, plans carried out, warm-up, structured output."""
