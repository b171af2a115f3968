"""DSpark's Markov heads (arXiv 2607.05147): logits that a token adds to those of the one after it.

Of three kinds, the token's vector is read as it is (``Markov``), times a gate of the block's
outputs (``GatedMarkov``), or by a small recurrent network (``RecurrentMarkov``). The weights are
whole on every device.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Block
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.collectives import shard_offset
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.products import einsum_f32

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class MarkovConfig:
    """A Markov head of this rank; ``kind`` in DeepSpec's words."""

    rank: int
    kind: MarkovKind = "vanilla"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"the rank of a Markov head is at least 1, got {self.rank}")

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "Markov":
        """The head of ShapeDtypeStructs."""
        rank, axes = self.rank, ("features", "features")
        tables: Any = dict.fromkeys(("before", "after"), array_shape(vocab, rank, dtype=dtype))
        if self.kind == "gated":
            gate = linear_shape(axes, (hidden + rank, rank), dtype, bias=True)
            return GatedMarkov(**tables, gate=gate)
        if self.kind == "rnn":
            joint = linear_shape(axes, (2 * rank + hidden, 3 * rank), dtype, bias=True)
            return RecurrentMarkov(**tables, joint=joint)
        return Markov(**tables)


@pytree
class Markov(Pytree):
    """The tables of a Markov head, and a Correction."""

    before: Array = array("embed_rows", "features")  # [V, r], read at the token
    after: Array = array("embed_rows", "features")  # [V, r], or [W, r]

    @property
    def config(self) -> MarkovConfig:
        return MarkovConfig(self.before.shape[1])

    def bias(self, target: Decoder, tokens: Array) -> Array:
        """This shard's part of what tokens add to the logits, if their vectors are read as they
        are: int32 [...] -> float32 [..., V / shards]."""
        return self._product(target, self.before[tokens])

    def _product(self, target: Decoder, vectors: Array) -> Array:
        return einsum_f32("...r,vr->...v", vectors, local_rows(target, self.after))

    def start(self, block: Block) -> Any:
        return ()

    @jax.named_scope("markov")
    def step(
        self, target: Decoder, block: Block, tokens: Array, depth: int | Array, carry: Any
    ) -> tuple[Array, Any]:
        vectors = self.before[tokens]  # [B, k, r]
        outputs = block.outputs[:, depth, None]
        outputs = jnp.broadcast_to(outputs, (*tokens.shape, outputs.shape[-1]))
        read, carry = self._read(vectors, outputs, carry)
        return block.logits[:, depth, None] + self._product(target, read), carry

    def _read(self, vectors: Array, outputs: Array, carry: Any) -> tuple[Array, Any]:
        """What the second table is multiplied by [B, k, r], and the new carry. Args: the vectors of
        the tokens [B, k, r], and the block's outputs at the depth [B, k, H]."""
        return vectors, carry

    def bytes_read(self, steps: int) -> int:
        """Bytes of weights that draft steps read; of ``before`` only a few rows."""
        return steps * (local_bytes(self) - local_bytes(self.before))

    def mapped(self, tensor_map: TensorMap) -> "Markov":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            before=tensor_map.array("markov_head.markov_w1.weight", self.before),
            after=tensor_map.array("markov_head.markov_w2.weight", self.after),
        )


@pytree
class GatedMarkov(Markov):
    """A Markov head whose vectors are multiplied by a gate of the block's output and the vector."""

    gate: Linear  # [H + r, r]

    @property
    def config(self) -> MarkovConfig:
        return MarkovConfig(self.before.shape[1], "gated")

    def _read(self, vectors: Array, outputs: Array, carry: Any) -> tuple[Array, Any]:
        gate = self.gate.float32(jnp.concatenate([outputs, vectors], axis=-1))
        return (jax.nn.sigmoid(gate) * vectors).astype(vectors.dtype), carry

    def mapped(self, tensor_map: TensorMap) -> Markov:
        gate = tensor_map.linear(self.gate, One("markov_head.gate_proj"))
        return Markov.mapped(self, tensor_map).replace(gate=gate)


@pytree
class RecurrentMarkov(Markov):
    """A Markov head that keeps a state of each path: float32 [B, k, r], zero before the root."""

    joint: Linear  # [2 r + H, 3 r]: of state, vector and output to gate, candidate and result

    @property
    def config(self) -> MarkovConfig:
        return MarkovConfig(self.before.shape[1], "rnn")

    def start(self, block: Block) -> Array:
        return jnp.zeros((len(block.outputs), 1, self.before.shape[1]), jnp.float32)

    def _read(self, vectors: Array, outputs: Array, carry: Array) -> tuple[Array, Array]:
        read = jnp.concatenate([carry.astype(vectors.dtype), vectors, outputs], axis=-1)
        gate, candidate, result = jnp.split(self.joint.float32(read), 3, axis=-1)
        kept = jax.nn.sigmoid(gate)
        state = kept * carry + (1 - kept) * jnp.tanh(candidate)
        return jnp.tanh(result).astype(vectors.dtype), state

    def mapped(self, tensor_map: TensorMap) -> Markov:
        joint = tensor_map.linear(self.joint, One("markov_head.joint_proj"))
        return Markov.mapped(self, tensor_map).replace(joint=joint)


def local_rows(target: Decoder, table: Array) -> Array:
    """This shard's rows of a table over the vocabulary: [V, r] -> [V / shards, r]. Logits of a
    reduced draft vocabulary are whole on every device."""
    axes, size = target.layout.vocab, target.local_vocab
    if not axes or table.shape[0] != target.config.vocab_size:
        return table
    padding = size * lax.axis_size(axes) - table.shape[0]  # as the target's vocabulary
    padded = jnp.pad(table, ((0, padding), (0, 0)))
    return lax.dynamic_slice_in_dim(padded, shard_offset(size, axes), size)
