"""What the families with experts have in common."""

from collections.abc import Callable

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Keys, model_of


def model_with_experts(
    hf: Keys,
    attention: AttentionConfig,
    experts: ExpertsConfig,
    has_experts: Callable[[int], bool] = lambda layer: True,
) -> ModelConfig:
    """A model of layers with the same attention, and experts where ``has_experts(layer)`` says so;
    dense MLPs elsewhere."""
    dense = DenseConfig(hf["intermediate_size"])
    mlps = (experts if has_experts(i) else dense for i in range(hf["num_hidden_layers"]))
    return model_of(hf, [LayerConfig(attention, mlp) for mlp in mlps])


def under_either_name(hf: Keys, published: str, saved: str, default: int) -> int:
    """A value that published configs have under one name, and those that transformers 5 saves under
    another. Raises ValueError for two values."""
    given = {hf[name] for name in (published, saved)} - {None}
    if len(given) > 1:
        raise ValueError(f"{published} and {saved} must be equal, got {hf[published]}, {hf[saved]}")
    return given.pop() if given else default
