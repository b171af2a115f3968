"""What comes before the tokens that are sampled."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class History(NamedTuple):
    """The tokens before the one that is sampled at each of N nodes."""

    tokens: Array  # int32 [B, S]
    lens: Array  # int32 [B], how many of ``tokens`` are committed
    path: Array  # int32 [B, N, D], those after them from each node upwards, padded with -1

    @property
    def sizes(self) -> Array:
        """Number of tokens before each node's sample: int32 [B, N]."""
        return self.lens[:, None] + jnp.sum(self.path >= 0, axis=-1)

    def last(self, count: int, first: Array) -> Array:
        """The last ``count`` tokens before each node's sample, the latest one last: int32
        [B, N, count]; -1 where there is none from place ``first`` [B] on."""
        place = self.sizes[..., None] - count + jnp.arange(count)  # [B, N, count]
        batch, nodes, _ = place.shape
        at = jnp.clip(place, 0, self.tokens.shape[1] - 1).reshape(batch, -1)
        found = jnp.take_along_axis(self.tokens, at, axis=1).reshape(place.shape)
        if depth := self.path.shape[-1]:  # from the node upwards
            up = self.sizes[..., None] - 1 - place
            drafted = jnp.take_along_axis(self.path, jnp.clip(up, 0, depth - 1), axis=2)
            found = jnp.where(place >= self.lens[:, None, None], drafted, found)
        return jnp.where(place >= first[:, None, None], found, -1)
