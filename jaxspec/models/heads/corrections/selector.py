"""DFlash 2's candidate selector: which of the likeliest tokens of each depth follow each other."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Lattice, PairScores
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """A selector among the ``candidates`` likeliest tokens of each depth, with vectors of ``rank``
    entries."""

    rank: int
    candidates: int

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "Selector":
        """The selector of ShapeDtypeStructs."""
        table = array_shape(vocab, self.rank, dtype=dtype)
        return Selector(
            before=table,
            after=table,
            hidden=linear_shape(("features", "units"), (hidden, self.rank), dtype),
            candidates=self.candidates,
        )


@pytree
class Selector(Pytree):
    """Weights of a selector, and a PairCorrection. They are whole on every device."""

    before: Array = array("embed_rows", "features")  # [V, r], read at the token before
    after: Array = array("embed_rows", "features")  # [V, r], read at a candidate
    hidden: Linear  # [H, r]
    candidates: int = static()

    @property
    def config(self) -> SelectorConfig:
        return SelectorConfig(self.before.shape[1], self.candidates)

    reads_sums = False  # a constant of each depth changes no softmax of its scores

    @jax.named_scope("selector")
    def scores(self, target: Decoder, lattice: Lattice, roots: Array) -> PairScores:
        unary, tokens = lattice.log_probs, lattice.tokens
        hidden = self.hidden.float32(lattice.outputs)  # [B, T, r]
        after = self.after[tokens]  # [B, T, K, r]
        root = self.before[roots] * hidden[:, 0]  # [B, r]
        before = self.before[tokens[:, :-1]] * hidden[:, 1:, None]  # [B, T - 1, K, r]
        return PairScores(
            tokens=tokens,
            first=unary[:, 0] + einsum_f32("br,bkr->bk", root, after[:, 0]),
            pairs=unary[:, 1:, None] + einsum_f32("btpr,btkr->btpk", before, after[:, 1:]),
        )

    def bytes_read(self, steps: int) -> int:
        """Bytes of weights that draft steps read; of tables only a few rows."""
        return local_bytes(self.hidden)

    def mapped(self, tensor_map: TensorMap) -> "Selector":
        """The same, with every array replaced by ``tensor_map``'s result."""
        name = "candidate_selector."
        return self.replace(
            before=tensor_map.array(f"{name}predecessor_codebook", self.before),
            after=tensor_map.array(f"{name}successor_codebook", self.after),
            hidden=tensor_map.linear(self.hidden, One(f"{name}hidden_projection")),
        )
