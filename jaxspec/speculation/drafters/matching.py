"""Where the last tokens of a sequence occurred before: what drafters without weights look up."""

import jax.numpy as jnp
from jax import Array


def match_lengths(tokens: Array, end: Array, most: int) -> Array:
    """How many tokens up to each position equal the row's last ones: int32 [B, S].

    Args:
      tokens: int32 [B, S].
      end: int32 [B], index of each row's last token. A match ends before it, so that a token of
        the row follows the match.
      most: tokens of the longest match. All B * S tokens are compared so many times.
    """
    index = jnp.arange(tokens.shape[1])
    length, alive = jnp.zeros_like(tokens), index < end[:, None]
    for back in range(most):
        shifted = jnp.roll(tokens, back, axis=1)
        last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0)[:, None], axis=1)
        alive &= (shifted == last) & (index >= back)
        length += alive
    return length
