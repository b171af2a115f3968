"""What the families with experts have in common."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.model import ModelConfig


def under_either_name(hf: Mapping[str, Any], published: str, saved: str, default: int) -> int:
    """A value that published configs have under one name, and those that transformers 5 saves under
    another. Raises ValueError for two values."""
    given = {hf[name] for name in (published, saved)} - {None}
    if len(given) > 1:
        raise ValueError(f"{published} and {saved} must be equal, got {hf[published]}, {hf[saved]}")
    return given.pop() if given else default


def with_experts(
    model: ModelConfig, experts: ExpertsConfig, where: Callable[[int], bool] = lambda layer: True
) -> ModelConfig:
    """The model with experts as the MLPs of the layers ``where`` says so."""
    layers = tuple(
        dataclasses.replace(layer, mlp=experts) if where(index) else layer
        for index, layer in enumerate(model.layers)
    )
    return dataclasses.replace(model, layers=layers)
