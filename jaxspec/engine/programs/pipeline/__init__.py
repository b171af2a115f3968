"""Pipelines: a model's layers in stages, each on devices of its own, in one engine."""
