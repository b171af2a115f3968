"""Where the last tokens of a sequence occurred before: what drafters without weights look up."""

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.checks import check_count

BLOCK = 128  # positions that are skipped together where many are searched


def check_limits(min_match: int, max_match: int) -> None:
    """Raise ValueError unless they are integers, and 1 <= min_match <= max_match."""
    check_count("min_match", min_match)
    check_count("max_match", max_match)
    if max_match < min_match:
        raise ValueError(f"max_match must be at least min_match {min_match}, got {max_match}")


def match_lengths(tokens: Array, end: Array, most: int) -> Array:
    """How many tokens up to each position equal the row's last ones: int32 [B, S].

    Args:
      tokens: int32 [B, S].
      end: int32 [B], index of each row's last token. A match ends before it, so that a token of
        the row follows the match.
      most: tokens of the longest match. All B * S tokens are compared so many times.
    """
    before_end = jnp.arange(tokens.shape[1]) < end[:, None]
    return _lengths(tokens, before_end, tokens, end, most)


def lengths_in_past(past: Array, tokens: Array, end: Array, most: int) -> Array:
    """The lengths of match_lengths for matches that end in another text: int32 [B, P].

    Args:
      past: int32 [P], negative where no token is. A token of the same text follows a match.
    """
    followed = jnp.append(past[1:] >= 0, False)
    return _lengths(past, followed, tokens, end, most)


def _lengths(text: Array, alive: Array, tokens: Array, end: Array, most: int) -> Array:
    """Lengths int32 [B, S] of matches ending in ``text`` [B, S] or [S] where ``alive`` is true."""
    index = jnp.arange(text.shape[-1])
    length = jnp.zeros((len(tokens), len(index)), jnp.int32)
    for back in range(most):
        last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0)[:, None], axis=1)
        inside = (index >= back) & (end[:, None] >= back)
        alive = alive & (jnp.roll(text, back, axis=-1) == last) & inside
        length += alive
    return length


def latest_places(found: Array, count: int) -> Array:
    """The last ``count`` positions where ``found`` [B, S], the last first: int32 [B, count].

    Where there are fewer, -1.
    """
    batch, size = found.shape
    place = jnp.where(found, jnp.arange(size, dtype=jnp.int32), -1)
    if size > 2 * count * BLOCK:  # sorting all positions takes longer than all comparisons
        blocks = jnp.pad(place, ((0, 0), (0, -size % BLOCK)), constant_values=-1)
        blocks = blocks.reshape(batch, -1, BLOCK)
        _, chosen = lax.top_k(jnp.max(blocks, axis=2), count)
        place = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(batch, -1)
    place, _ = lax.top_k(place, min(count, size))
    return jnp.pad(place, ((0, 0), (0, count - place.shape[1])), constant_values=-1)
