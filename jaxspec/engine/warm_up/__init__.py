"""Compiles programs before they are needed, and measures what they cost."""
