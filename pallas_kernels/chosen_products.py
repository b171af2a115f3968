"""Products of rows with experts that they chose, before they are weighted and added up."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class ChosenProducts(NamedTuple):
    """What k chosen experts made of each of N rows.

    Attributes:
      products: float32 [L, H], where a kernel has left them, in any order.
      places: int32 [N, k], the entry of each choice; below 0 for none, which adds nothing.
      weights: float32 [N, k], of the choices.
    """

    products: Array
    places: Array
    weights: Array

    def total(self) -> Array:
        """The weighted sums in the order of choices, float32 [N, H]. (That of jnp.sum is XLA's.)"""
        products = self.products[jnp.maximum(self.places, 0)]
        there = (self.places >= 0)[..., None]
        terms = jnp.where(there, products * self.weights[..., None], 0.0)
        return functools.reduce(jnp.add, jnp.unstack(terms, axis=1))
