"""Times the engine without checkpoints: known shapes, random weights, synthetic acceptance."""
