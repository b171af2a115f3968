"""Model code: pure functions over frozen weight pytrees."""
