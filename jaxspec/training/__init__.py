"""Training of target models and draft heads: pure training steps, and their host loops."""
