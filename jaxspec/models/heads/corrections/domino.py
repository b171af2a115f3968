"""Domino's correction: a recurrent network over the embeddings of a path's tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Block
from jaxspec.models.heads.corrections.markov import local_rows
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32


@dataclasses.dataclass(frozen=True)
class DominoConfig:
    """Sizes of a Domino correction.

    Attributes:
      state: entries of the recurrent network's state.
      rank: of what is added to logits.
      first: the first depth, counted from 0, whose logits are corrected.
    """

    state: int
    rank: int
    first: int

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "Domino":
        """The correction of ShapeDtypeStructs."""
        return Domino(
            of_token=array_shape(3 * self.state, hidden, dtype=dtype),
            of_state=array_shape(3 * self.state, self.state, dtype=dtype),
            down=linear_shape(("features", "units"), (hidden + self.state, self.rank), dtype),
            after=array_shape(vocab, self.rank, dtype=dtype),
            first=self.first,
        )


@pytree
class Domino(Pytree):
    """Weights of the recurrent network and of what it adds, and a Correction. They are whole on
    every device. Gates of the network are rows in thirds: reset, update, new."""

    of_token: Array = array("units", "features")  # [3 G, H], as in the checkpoint
    of_state: Array = array("units", "features")  # [3 G, G]
    down: Linear  # [H + G, r]
    after: Array = array("embed_rows", "features")  # [V, r]
    first: int = static()

    @property
    def config(self) -> DominoConfig:
        return DominoConfig(self.of_state.shape[1], self.after.shape[1], self.first)

    def start(self, block: Block) -> Array:
        return jnp.zeros((len(block.outputs), 1, self.of_state.shape[1]), jnp.float32)

    @jax.named_scope("domino")
    def step(
        self, target: Decoder, block: Block, tokens: Array, depth: int | Array, carry: Array
    ) -> tuple[Array, Array]:
        dtype = block.outputs.dtype
        state = self._advanced(decoder.plain_embed(target, tokens).astype(dtype), carry)
        logits = jnp.broadcast_to(
            block.logits[:, depth, None], (*tokens.shape, block.logits.shape[-1])
        )
        if isinstance(depth, int) and depth < self.first:
            return logits, state
        outputs = block.outputs[:, depth, None]
        outputs = jnp.broadcast_to(outputs, (*tokens.shape, outputs.shape[-1]))
        units = jax.nn.silu(self.down(jnp.concatenate([outputs, state.astype(dtype)], axis=-1)))
        added = einsum_f32("bkr,vr->bkv", units, local_rows(target, self.after))
        return logits + jnp.where(depth >= self.first, added, 0), state

    def _advanced(self, embedded: Array, state: Array) -> Array:
        """The state float32 [B, k, G] after one token more, of embeddings [B, k, H]."""
        read = jnp.split(einsum_f32("bkh,gh->bkg", embedded, self.of_token), 3, axis=-1)
        kept = state.astype(embedded.dtype)
        held = jnp.split(einsum_f32("bks,gs->bkg", kept, self.of_state), 3, axis=-1)
        reset, update = (jax.nn.sigmoid(read[gate] + held[gate]) for gate in (0, 1))
        new = jnp.tanh(read[2] + reset * held[2])
        return (1 - update) * new + update * state

    def bytes_read(self, steps: int) -> int:
        """All of them in every step."""
        return steps * local_bytes(self)

    def mapped(self, tensor_map: TensorMap) -> "Domino":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            of_token=tensor_map.array("prefix_gru.weight_ih_l0", self.of_token),
            of_state=tensor_map.array("prefix_gru.weight_hh_l0", self.of_state),
            down=tensor_map.linear(self.down, One("embed_proj.0")),
            after=tensor_map.array("embed_proj.2.weight", self.after),
        )
