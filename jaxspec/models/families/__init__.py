"""Families of models: what reads their config.json."""
