"""Text of requests that ended, in a ring on the device: lookup may search it, too."""

import jax.numpy as jnp
from jax import Array

from jaxspec.parallel.pytree import Pytree, array, pytree

GAP = -1  # after each text, and where nothing was written; no token equals it


@pytree
class PastText(Pytree):
    """The latest S tokens of past texts. New ones overwrite the oldest.

    A GAP follows each text, so neither a match nor what follows it runs on into the next one. It
    must be written with the text, before anything is looked up.
    """

    tokens: Array = array("past")  # int32 [S]
    end: Array = array()  # int32 [], where the next token is written

    @property
    def in_order(self) -> Array:
        """The oldest token first; if any was written, the last is a GAP: int32 [S]."""
        return jnp.roll(self.tokens, -self.end)

    def with_more(self, tokens: Array, count: Array) -> "PastText":
        """With the first ``count`` [] of ``tokens`` [n] behind the others; n is at most S."""
        size, offset = self.tokens.shape[0], jnp.arange(tokens.shape[0])
        place = jnp.where(offset < count, (self.end + offset) % size, size)
        written = self.tokens.at[place].set(tokens, mode="drop")
        return self.replace(tokens=written, end=(self.end + count) % size)


def empty_past(size: int) -> PastText | None:
    """Room for ``size`` tokens; None without any."""
    if size == 0:
        return None
    return PastText(tokens=jnp.full(size, GAP, jnp.int32), end=jnp.int32(0))
