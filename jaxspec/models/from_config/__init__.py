"""How config.json becomes the configs of models and heads."""
