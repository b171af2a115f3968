"""Keys and values of config.json, and the names of tensors in checkpoints."""
