"""Measures quality (acceptance, perplexity, speed-up) and speed (benchmarks/)."""
