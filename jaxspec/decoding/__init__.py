"""Draft, verify, accept: one round of speculative decoding, as pure functions."""
