"""Samples in the form of trainers that pad prompts on the left, and texts back from it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxspec.config.checks import is_integer
from jaxspec.decoding.functional.sample import Samples
from jaxspec.decoding.state import Ending


class PaddedSamples(NamedTuple):
    """B * S rows, the samples of a prompt next to each other: prompts of P columns, completions of
    N. Where a mask is false tokens are the padding, and log-probabilities 0."""

    prompt_ids: Array  # int32 [B * S, P], padded on the left
    prompt_mask: Array  # bool [B * S, P]
    completion_ids: Array  # int32 [B * S, N], padded on the right
    completion_mask: Array  # bool [B * S, N]
    logprobs: Array  # float32 [B * S, N], raw
    policy_logprobs: Array  # float32 [B * S, N]


def split_padded(samples: Samples, pad_id: int, *, keep_stop: bool = True) -> PaddedSamples:
    """Prompts padded on the left and completions padded on the right, as many trainers take them.

    Args:
      pad_id: the token that stands where a mask is false. A text may have it, too: read the masks.
      keep_stop: the stop token that ended a text is part of the completion, and so is trained.

    Raises ValueError for a pad_id that is no token id.
    """
    if not is_integer(pad_id) or not 0 <= pad_id < 2**31:
        raise ValueError(f"pad_id must be a token id, got {pad_id!r}")
    batch, count, length = samples.tokens.shape
    columns = samples.prompt_columns
    new = jnp.arange(length - columns)
    start = samples.prompt_lens[:, None, None]
    num_new = samples.lengths - samples.prompt_lens[:, None]
    if not keep_stop:
        num_new = num_new - (samples.ending == Ending.STOP)
    left = jnp.arange(columns) - (columns - start)  # [B, 1, P]

    def rows(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch, count, x.shape[-1])).reshape(batch * count, -1)

    def taken(x: Array, place: Array, mask: Array, padding: float) -> Array:
        place = jnp.broadcast_to(jnp.clip(place, 0, length - 1), mask.shape)
        return rows(jnp.where(mask, jnp.take_along_axis(x, place, axis=2), padding))

    prompt_mask = jnp.broadcast_to(left >= 0, (batch, count, columns))
    mask = new < num_new[..., None]
    return PaddedSamples(
        prompt_ids=taken(samples.tokens, left, prompt_mask, pad_id),
        prompt_mask=rows(prompt_mask),
        completion_ids=taken(samples.tokens, start + new, mask, pad_id),
        completion_mask=rows(mask),
        logprobs=taken(samples.logprobs, start + new, mask, 0),
        policy_logprobs=taken(samples.policy_logprobs, start + new, mask, 0),
    )


def right_padded(tokens: ArrayLike, mask: ArrayLike) -> tuple[Array, Array]:
    """Texts of a padded batch as token_logprobs and sample take them: the inverse of split_padded.

    Args:
      tokens: integers [B, T].
      mask: bool or integers [B, T]: the tokens that count, wherever they stand. So a prompt that is
        padded on the left may come together with a completion that is padded on the right.

    Returns the tokens that count in their order, from column 0 on, then zeros, int32 [B, T], and
    how many there are of each row, int32 [B].

    Raises ValueError for a mask of another shape.
    """
    ids, counts = jnp.asarray(tokens), jnp.asarray(mask) != 0
    if ids.ndim != 2 or ids.shape != counts.shape:
        shapes = f"{list(ids.shape)} and {list(counts.shape)}"
        raise ValueError(f"tokens and mask must both be [B, T], got {shapes}")
    order = jnp.argsort(~counts, axis=1, stable=True)
    lengths = jnp.sum(counts, axis=1, dtype=jnp.int32)
    inside = jnp.arange(ids.shape[1]) < lengths[:, None]
    moved = jnp.take_along_axis(ids, order, axis=1).astype(jnp.int32)
    return jnp.where(inside, moved, 0), lengths
