"""Timing the engine without checkpoints: known shapes, random weights, fixed acceptance."""
