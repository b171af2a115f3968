"""What the families with experts have in common."""

from collections.abc import Callable

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import MixerConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Keys, model_of
from jaxspec.models.json.values import is_integer, shown


def model_with_experts(
    hf: Keys,
    mixer: MixerConfig,
    experts: ExpertsConfig,
    has_experts: Callable[[int], bool] = lambda layer: True,
) -> ModelConfig:
    """A model of layers with the same mixer, and experts where ``has_experts(layer)`` says so;
    dense MLPs elsewhere."""
    dense = DenseConfig(hf["intermediate_size"])
    mlps = (experts if has_experts(i) else dense for i in range(hf["num_hidden_layers"]))
    return model_of(hf, [LayerConfig(mixer, mlp) for mlp in mlps])


def after_dense(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts where the first ones do not. Raises ValueError for a bad number."""
    first = hf["first_k_dense_replace"]
    if not is_integer(first) or first < 0:
        raise ValueError(f"first_k_dense_replace must be an integer from 0 on, got {shown(first)}")
    return lambda layer: layer >= first


def every_few(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts: every ``decoder_sparse_step``-th, but none of
    ``mlp_only_layers``. Raises ValueError for what is no list of the model's layers."""
    dense, step = hf["mlp_only_layers"] or [], hf["decoder_sparse_step"]
    if not isinstance(dense, list) or not all(map(is_integer, dense)):
        raise ValueError(f"mlp_only_layers must be a list of integers, got {shown(dense)}")
    count = hf["num_hidden_layers"]
    if others := [layer for layer in dense if not 0 <= layer < count]:
        raise ValueError(f"mlp_only_layers has {shown(others)}, and the model {count} layers")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def sigmoid_experts(hf: Keys, num_experts: int) -> ExpertsConfig:
    """Experts as DeepSeek-V3 has them; ``num_experts`` if the config does not say how many."""
    routing = RoutingConfig(
        under_either_name(hf, "n_routed_experts", "num_local_experts", num_experts),
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=hf["norm_topk_prob"],
        scale=float(hf["routed_scaling_factor"]),
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
        correction=True,
    )
    width = hf["moe_intermediate_size"]
    return ExpertsConfig(width, routing, shared_size=hf["n_shared_experts"] * width)


def under_either_name(hf: Keys, published: str, saved: str, default: int) -> int:
    """A value that published configs have under one name, and those that transformers 5 saves under
    another. Raises ValueError for two values."""
    given = {hf[name] for name in (published, saved)} - {None}
    if len(given) > 1:
        raise ValueError(f"{published} and {saved} must be equal, got {hf[published]}, {hf[saved]}")
    return given.pop() if given else default
