"""AdamW and its learning rate schedule, for language models and draft heads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxspec.models.shapes import weight_name
from jaxspec.training.precision import Attention, ComputeDtype

MATRICES = frozenset(
    {"embed", "qkv", "o", "gate_up", "down", "lm_head", "fc", "qkvz", "ba", "router", "shared_gate"}
    | {"bcx", "cbxzt", "qkvb", "fg_in", "f", "g"}  # of short convolutions, Mamba-2, Kimi's delta
    | {"to_latent", "from_latent"}  # around experts
    | {"gate", "before", "after"}  # of a Markov head
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW, and what its gradients are computed from. The learning rate rises
    linearly, stays, and falls linearly to zero.

    Attributes:
      decay_fraction: the share of all steps, at the end, over which the learning rate falls.
      seed: of the initial weights and the order of the data.
      attention: ``cudnn`` is a flash kernel for bfloat16 on NVIDIA GPUs; of a head's training, for
        the target's forward pass.
      compute_dtype: dtype of the activations and of the weights that compute them.
    """

    learning_rate: float = 3e-3
    warmup_steps: int = 200
    decay_fraction: float = 0.5
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    attention: Attention = "xla"
    compute_dtype: ComputeDtype = "bfloat16"

    def __post_init__(self):
        if self.warmup_steps < 1:
            raise ValueError("warmup_steps must be at least 1")
        if not (self.learning_rate > 0 and 0 < self.decay_fraction <= 1):
            raise ValueError("learning_rate must be positive, decay_fraction in (0, 1]")


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW without the learning-rate factor. Weight decay applies to matrices only."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: weight_name(path) in MATRICES, params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def learning_rate(config: OptimizerConfig, step: Array, total_steps: Array) -> Array:
    """float32 [] of step int32 []; until the decay begins it does not depend on ``total_steps``."""
    step, total = step.astype(jnp.float32), jnp.asarray(total_steps, jnp.float32)
    rise = (step + 1) / config.warmup_steps
    fall = (total - step) / jnp.maximum(config.decay_fraction * total, 1)
    return config.learning_rate * jnp.clip(jnp.minimum(rise, fall), 0, 1)


def descend(
    config: OptimizerConfig,
    params: Any,
    moments: optax.OptState,
    gradients: Any,
    rate: Array,
) -> tuple[Any, optax.OptState, Array]:
    """One AdamW step: (weights, moments, the gradients' norm float32 [])."""
    updates, moments = adamw(config).update(gradients, moments, params)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    return params, moments, optax.tree.norm(gradients)
