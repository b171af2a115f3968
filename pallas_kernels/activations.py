"""From gate and up to hidden units."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Clamp(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate) in place of SwiGLU, where gate is at most ``limit``
    and up is between plus and minus ``limit``."""

    alpha: float
    limit: float


class Limit(NamedTuple):
    """SwiGLU whose factors are limited: silu(gate) is at most ``limit``, and up is between plus and
    minus ``limit``."""

    limit: float


class Bound(NamedTuple):
    """SwiGLU of limited inputs: the gate is at most ``limit``, and up is between plus and minus
    ``limit``."""

    limit: float


@dataclasses.dataclass(frozen=True)
class Gelu:
    """GELU of the gate in place of its SiLU, by the approximation with tanh (arXiv 1606.08415)."""


Gating = Clamp | Limit | Bound | Gelu


def units_of(
    gate: Array, up: Array, clamp: Gating | None, sigmoid: Callable[[Array], Array]
) -> Array:
    """Hidden units of gate and up, in their dtype."""
    if clamp is None:
        return gate * sigmoid(gate) * up
    if isinstance(clamp, Gelu):  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        return gate * sigmoid(2 * (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up
    up = jnp.minimum(jnp.maximum(up, -clamp.limit), clamp.limit)
    match clamp:
        case Clamp(alpha, limit):
            gate = jnp.minimum(gate, limit)
            return (up + 1) * gate * sigmoid(alpha * gate)
        case Limit(limit):
            return jnp.minimum(gate * sigmoid(gate), limit) * up
        case Bound(limit):
            gate = jnp.minimum(gate, limit)
            return gate * sigmoid(gate) * up
