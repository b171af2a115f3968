"""Training of target models and draft heads: pure steps, and the host loops around them."""
