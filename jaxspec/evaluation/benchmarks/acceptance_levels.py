"""Synthetic acceptance of many levels in one engine: each request has its own."""

import dataclasses

import jax.numpy as jnp

from jaxspec.config.speculation import Proposal, sound_proposals
from jaxspec.decoding.acceptance import Accepted, Match, Verified
from jaxspec.decoding.sampling.noise import Stream, uniform
from jaxspec.decoding.trees.tree import path_to

# A tree misses a token where the chain does, to this power: with the built-in pair a chain of 5
# misses 0.32 of the tokens, and a tree of 60 nodes 0.15 (docs/benchmarks.md).
TREE_MISSES = 1.7


@dataclasses.dataclass(frozen=True)
class AcceptanceLevels:
    """Accept each drafted token of a chain with the request's chance, whatever the token is.

    That is ``levels[seed % len(levels)]``, so one compiled program serves all levels. For timing
    only: the text has no meaning. It costs as much as Match.
    """

    levels: tuple[float, ...]

    def __post_init__(self):
        if not self.levels or not all(0 <= level <= 1 for level in self.levels):
            raise ValueError(f"acceptance levels must lie in 0 .. 1, got {self.levels}")

    def proposals(self, is_chain: bool) -> tuple[Proposal, ...]:
        return sound_proposals("match", is_chain)

    def accept(self, verified: Verified) -> Accepted:
        tree, sampled = verified.tree, Match().accept(verified)
        seeds, count = verified.sampling.seeds, len(self.levels)
        chance = jnp.asarray(self.levels, jnp.float32)[seeds % count]
        if tree.tokens.shape[1] > tree.max_depth + 1:  # not a chain
            chance = 1 - (1 - chance) ** TREE_MISSES
        places = verified.context_lens[:, None] + 1 + jnp.arange(tree.max_depth)  # [B, D]
        trials = uniform(seeds, Stream.ACCEPT, places, jnp.arange(1))[..., 0]
        depth = jnp.cumprod(trials < chance[:, None], axis=1).sum(axis=1)
        leaf = jnp.argmax(jnp.where(tree.depth <= depth[:, None], tree.depth, -1), axis=1)
        path, depth = path_to(tree, leaf)
        return sampled.replace(path=path, depth=depth)
