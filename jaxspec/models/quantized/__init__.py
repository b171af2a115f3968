"""Weights in fewer bits: formats of Linear, and what makes them."""
