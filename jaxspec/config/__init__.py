"""Configuration of models, the cache and speculation: frozen, hashable dataclasses."""
