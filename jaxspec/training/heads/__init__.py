"""Trains draft heads."""
