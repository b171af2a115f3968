"""Token masks: which tokens a row may sample, one bit per token, 32 tokens in each word."""

import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.sampling import vocab_ids
from jaxspec.parallel import Layout


def restrict(logits: Array, masks: Array, layout: Layout) -> Array:
    """Raw logits [B, N, V / shards], -inf for tokens whose bit is not set in ``masks``.

    ``masks`` is uint32 [B, N, W], the same on every shard: bit ``t % 32`` of word ``t // 32`` is
    token ``t``. Tokens past the last word are not allowed. NaN and +inf stay, so that a mask does
    not hide a broken model. A node whose mask is empty is treated as one with logits that are not
    finite.
    """
    ids = vocab_ids(logits.shape[-1], layout)  # a shard need not begin or end at a word
    words = masks.at[..., ids >> 5].get(mode="fill", fill_value=0)
    allowed = (words >> (ids & 31).astype(jnp.uint32)) & 1 == 1
    return jnp.where(~allowed & (logits < jnp.inf), -jnp.inf, logits)


def check_masks(masks: Array, lead: tuple[int, ...], vocab_size: int) -> None:
    """Raise ValueError for masks that are not uint32 [*lead, ceil(vocab_size / 32)]."""
    shape = (*lead, -(-vocab_size // 32))
    if masks.shape != shape or masks.dtype != jnp.uint32:
        raise ValueError(
            f"masks must be uint32 {list(shape)}, one bit for each of {vocab_size} tokens, not "
            f"{masks.dtype} {list(masks.shape)}"
        )
