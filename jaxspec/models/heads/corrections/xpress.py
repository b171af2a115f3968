"""XPress's causal refiner: a small network along the block, over each position's previous token.

Published code iterates it from the block's own guess: every pass reads the tokens of the pass
before at all positions at once (Jacobi passes). A position reads nothing of later ones, so after as
many passes as there are positions nothing changes: each token is the likeliest after those before
it. The walk here computes that fixed point in one go, position by position. It also gives what
passes cannot: the logits after any path, so trees, and tokens that are drawn.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Block
from jaxspec.models.heads.corrections.markov import local_rows
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.shaped_tensors import shaped
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.products import einsum_f32


@dataclasses.dataclass(frozen=True)
class XPressConfig:
    """Sizes of a refiner: of its vectors, of its MLP, and of the blocks it was trained for."""

    rank: int
    units: int
    block_size: int

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "XPress":
        """The refiner of ShapeDtypeStructs."""
        rank, axes = self.rank, ("features", "units")
        table = array_shape(vocab, rank, dtype=dtype)
        return XPress(
            before=table,
            after=table,
            down_output=linear_shape(axes, (hidden, rank), dtype),
            down_mean=linear_shape(axes, (hidden, rank), dtype),
            join=linear_shape(axes, (3 * rank, rank), dtype),
            mix=array_shape(rank, self.block_size, self.block_size, dtype=dtype),
            gate=linear_shape(axes, (rank, self.units), dtype),
            up=linear_shape(axes, (rank, self.units), dtype),
            down=linear_shape(axes, (self.units, rank), dtype),
        )


@pytree
class XPress(Pytree):
    """Weights of the refiner, and a Correction. They are whole on every device.

    A path's carry are the vectors of its positions, [B, k, 1 + T, r], the root's first; those of
    later positions are zero.
    """

    before: Array = array("embed_rows", "features")  # [V, r], read at the token before
    after: Array = array("embed_rows", "features")  # [V, r]
    down_output: Linear  # [H, r]
    down_mean: Linear  # [H, r]
    join: Linear  # [3 r, r]
    mix: Array = array("units", "depth", "depth")  # [r, N, N], the lower triangle is read
    gate: Linear  # [r, F]
    up: Linear  # [r, F]
    down: Linear  # [F, r]

    @property
    def config(self) -> XPressConfig:
        rank, size, _ = self.mix.shape
        return XPressConfig(rank, self.gate.out_shape[0], size)

    def start(self, block: Block) -> Array:
        """The root's vector reads the token before it."""
        assert (
            block.root_output is not None and block.before is not None
        )  # see BlockHead.reads_root
        first = self._vector(block, block.before[:, None], place=0)
        depths = block.outputs.shape[1]
        return jnp.pad(first[:, :, None], ((0, 0), (0, 0), (0, depths), (0, 0)))

    @jax.named_scope("xpress")
    def step(
        self, target: Decoder, block: Block, tokens: Array, depth: int | Array, carry: Array
    ) -> tuple[Array, Array]:
        place = depth + 1
        vector = self._vector(block, tokens, place)
        carry = carry.at[:, :, place].set(vector)
        # Vectors of later positions are zero, so the row's upper part is not read.
        weights = jnp.tril(self.mix)[:, place, : carry.shape[2]]
        mixed = vector + einsum_f32("bkjr,rj->bkr", carry, weights).astype(vector.dtype)
        mixed += self.down(jax.nn.silu(self.gate(mixed)) * self.up(mixed))
        added = einsum_f32("bkr,vr->bkv", mixed, local_rows(target, self.after))
        return block.logits[:, depth, None] + added, carry

    def _vector(self, block: Block, tokens: Array, place: int | Array) -> Array:
        """What the position ``place`` of the block reads [B, k, r]: its output, the mean output of
        the block, and the token before it [B, k]."""
        assert block.root_output is not None
        whole = jnp.concatenate([block.root_output[:, None], block.outputs], axis=1)
        mean = whole.mean(axis=1, keepdims=True, dtype=jnp.float32).astype(whole.dtype)
        read = self.before[tokens]
        outputs = self.down_output(whole)  # of all positions, so that steps share one product
        outputs = jnp.broadcast_to(outputs[:, place, None], read.shape)
        mean = jnp.broadcast_to(self.down_mean(mean), read.shape)
        return self.join(jnp.concatenate([outputs, mean, read], axis=-1))

    def bytes_read(self, steps: int) -> int:
        """Bytes of weights that draft steps read; of ``before`` only a few rows."""
        return steps * (local_bytes(self) - local_bytes(self.before))

    def mapped(self, tensor_map: TensorMap) -> "XPress":
        """The same, with every array replaced by ``tensor_map``'s result."""

        def linear(found: Linear, name: str) -> Linear:
            return tensor_map.linear(found, One(f"xpress_head.{name}"))

        return self.replace(
            before=tensor_map.array("xpress_head.w1.weight", self.before),
            after=tensor_map.array("xpress_head.w2.weight", self.after),
            down_output=linear(self.down_output, "down_h"),
            down_mean=linear(self.down_mean, "down_g"),
            join=linear(self.join, "in_proj"),
            mix=shaped(tensor_map, "xpress_head.mix.L", self.mix),
            gate=linear(self.gate, "mlp.gate_proj"),
            up=linear(self.up, "mlp.up_proj"),
            down=linear(self.down, "mlp.down_proj"),
        )
