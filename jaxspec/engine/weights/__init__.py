"""Changes of an engine's weights, also while requests run."""
