"""Compiled programs: for which sizes, their arguments, and their results."""
