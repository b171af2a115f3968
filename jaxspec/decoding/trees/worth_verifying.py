"""How many tokens of a chain are worth verifying, by how likely each is accepted.

A round's program has one width, so a shorter chain saves nothing where a pass reads all weights.
But of experts only those are read that some token chooses, and padding chooses none.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.decoding.trees.tree import DraftTree, make_chain


@dataclasses.dataclass(frozen=True)
class NodeCosts:
    """What a round costs by the tokens that it verifies.

    Attributes:
      fixed: seconds of a round besides those of reading experts, drafting included.
      experts: seconds of reading all experts.
      chosen: share of them that a token chooses.
    """

    fixed: float
    experts: float
    chosen: float

    def growth(self, num_rows: int, depth: int) -> np.ndarray:
        """The share by which a round takes longer if each row verifies one token more than 0, 1,
        ... ``depth - 1`` drafted ones: float64 [depth].

        The first of some tokens read more experts than the last, so it is the mean of a token and
        those that may follow it. With many rows, which read nearly all experts together, the first
        token alone would be too dear, and all of them are nearly free.
        """
        tokens = num_rows * (1 + np.arange(depth + 1))
        seconds = self.fixed + self.experts * (1 - (1 - self.chosen) ** tokens)
        left = depth - np.arange(depth)
        return (seconds[-1] - seconds[:-1]) / left / seconds[:-1]


def worth_verifying(confidence: Array, growth: np.ndarray) -> Array:
    """The number of tokens of each row's chain that are worth verifying: int32 [B].

    A chain ends before the first token that gains a smaller share of the round's expected tokens
    than it costs of the round's time. This depends on the tokens before that one, and not on it: so
    it may have been drawn at random, and rejection sampling stays exact.

    Args:
      confidence: float32 [B, depth], how likely each token is accepted if those before it are.
      growth: [depth], see NodeCosts.
    """
    survival = jnp.cumprod(confidence, axis=1)
    before = 1 + jnp.cumsum(survival, axis=1) - survival  # with the bonus token
    pays = survival >= before * jnp.asarray(growth, jnp.float32)
    return jnp.sum(jnp.cumprod(pays.astype(jnp.int32), axis=1), axis=1)


def cut(chain: DraftTree, num_tokens: Array) -> DraftTree:
    """The first ``num_tokens`` [B] drafted tokens of a chain; the others become padding."""
    return make_chain(chain.tokens, 1 + num_tokens, chain.probs)
