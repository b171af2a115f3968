"""DSpark's Markov head (arXiv 2607.05147): logits that a token adds to those of the one after it.

Its tables are whole on every device.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Block
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel.collectives import shard_offset
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.products import einsum_f32


@dataclasses.dataclass(frozen=True)
class MarkovConfig:
    """A Markov head of this rank."""

    rank: int

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"the rank of a Markov head is at least 1, got {self.rank}")

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "Markov":
        """The head of ShapeDtypeStructs."""
        table = array_shape(vocab, self.rank, dtype=dtype)
        return Markov(before=table, after=table)


@pytree
class Markov(Pytree):
    """The tables of a Markov head, and a Correction."""

    before: Array = array("embed_rows", "features")  # [V, r], read at the token
    after: Array = array("embed_rows", "features")  # [V, r]

    @property
    def rank(self) -> int:
        return self.before.shape[1]

    def bias(self, target: Decoder, tokens: Array) -> Array:
        """This shard's part of what tokens add: int32 [...] -> float32 [..., V / shards]."""
        with jax.named_scope("markov"):
            return einsum_f32("...r,vr->...v", self.before[tokens], local_rows(target, self.after))

    def start(self, block: Block) -> tuple[()]:
        return ()

    def step(
        self, target: Decoder, block: Block, tokens: Array, depth: int | Array, carry: tuple[()]
    ) -> tuple[Array, tuple[()]]:
        return block.logits[:, depth, None] + self.bias(target, tokens), carry

    def mapped(self, tensor_map: TensorMap) -> "Markov":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            before=tensor_map.array("markov_head.markov_w1.weight", self.before),
            after=tensor_map.array("markov_head.markov_w2.weight", self.after),
        )


def local_rows(target: Decoder, table: Array) -> Array:
    """This shard's rows of a table over the vocabulary: [V, r] -> [V / shards, r]."""
    axes, size = target.layout.vocab, target.local_vocab
    if not axes:
        return table
    padding = size * lax.axis_size(axes) - table.shape[0]  # as the target's vocabulary
    padded = jnp.pad(table, ((0, padding), (0, 0)))
    return lax.dynamic_slice_in_dim(padded, shard_offset(size, axes), size)
