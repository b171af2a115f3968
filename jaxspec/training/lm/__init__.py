"""Trains language models."""
