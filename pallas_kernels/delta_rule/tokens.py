"""What tokens do to the state of a gated delta rule."""

from typing import NamedTuple

from jax import Array


class Tokens(NamedTuple):
    """B rows of T tokens with G key heads and r value heads each, float32."""

    k: Array  # [B, T, G, Dk] keys
    v: Array  # [B, T, G, r, Dv] values
    g: Array  # [B, T, G, r] logs of the decays
    beta: Array  # [B, T, G, r] strengths
