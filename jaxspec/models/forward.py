"""One pass of a model over a few tokens: what all its layers share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config import LayerConfig, RopeConfig
from jaxspec.models.linear import Addend, Product
from jaxspec.models.rope import rope_angles
from jaxspec.sharding import Layout
from pallas_kernels.add_rms_norm import add_rms_norm, takes_parts
from pallas_kernels.add_rms_norm.reference import rms_norm as rms_norm_reference
from pallas_kernels.products import sum_parts
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.rope_kv_write import takes_parts as heads_take_parts
from pallas_kernels.rope_kv_write.reference import rotated_heads
from pallas_kernels.selection import Kernels

# How a pass's tokens see the past: (layer's state, heads, window) -> (output [B, T, Q, D], state)
Attend = Callable[[Any, "Heads", int | None], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """What all layers of one pass share.

    Attributes:
      attend: how the tokens see the past. In an engine it is a PagedAttend: a mixer that is no
        attention reads from it where its tokens lie.
      ropes: angles by rope config, as ``rope_angles`` makes them.
      eps: of the norms.
    """

    attend: Attend
    ropes: Mapping[RopeConfig, Array]
    eps: float
    layout: Layout
    kernels: Kernels

    def norm(self, x: Array, weight: Array | None) -> Array:
        """As rms_norm, with the model's eps."""
        return rms_norm(x, weight, self.eps)

    def add_norm(self, x: Array, product: Addend, weight: Array | None) -> tuple[Array, Array]:
        """x plus what a block adds to it, and the norm of the sum. No weight: the sum itself."""
        taking = self._taking("add_rms_norm", takes_parts)
        parts = product.partial_sums(self.layout, self.kernels, taking)
        with jax.named_scope("norm"):
            if weight is None:
                total = x + sum_parts(parts, len(x), x.dtype)
                return total, total
            implementation = self.kernels.implementation("add_rms_norm")
            return add_rms_norm(x, parts, weight, self.eps, implementation)

    def heads(
        self, product: Product, rope: RopeConfig, q_norm: Array | None, k_norm: Array | None
    ) -> "Heads":
        """The heads of a projection, still to be normed and rotated."""
        taking = self._taking("rope_kv_write", heads_take_parts)
        parts = product.partial_sums(self.layout, self.kernels, taking)
        return Heads(
            parts=parts,
            dtype=product.x.dtype,
            rope=self.ropes[rope],
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            kernels=self.kernels,
        )

    def _taking(
        self, operation: str, fits: Callable[[jnp.dtype, int], bool]
    ) -> Callable[[jnp.dtype, int], bool]:
        return fits if operation in self.kernels else lambda dtype, width: False


@dataclasses.dataclass(frozen=True)
class Heads:
    """What attention starts from: a projection's heads, still to be normed and rotated.

    Attributes:
      parts: [S, B, T, G, R, D], a product's: of each KV head its queries, then its key, then its
        value. Rows past B are padding.
      dtype: of the heads themselves.
      rope: as ``rope_angles`` makes it.
      q_norm, k_norm: [D] weights, or None.
      eps: of the norms.
    """

    parts: Array
    dtype: jnp.dtype
    rope: Array
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    kernels: Kernels

    def rotated(self) -> tuple[Array, Array, Array]:
        """Queries [B, T, Q, D], keys and values [B, T, G, D]."""
        qkv = sum_parts(self.parts, len(self.rope), self.dtype)
        return rotated_heads(qkv, self.rope, self.q_norm, self.k_norm, self.eps)

    def written(self, k_pages: Array, v_pages: Array, slots: Array) -> tuple[Array, Array, Array]:
        """Queries [B, T, Q, D], and the pages [P, G, K, D] with keys and values at slots [B, T]."""
        return rope_kv_write(
            self.parts,
            self.rope,
            self.q_norm,
            self.k_norm,
            k_pages,
            v_pages,
            slots,
            eps=self.eps,
            implementation=self.kernels.implementation("rope_kv_write"),
        )


def make_pass(
    layers: Iterable[LayerConfig],
    positions: Array,  # [B, T] rotary positions
    attend: Attend,
    eps: float,
    layout: Layout,
    kernels: Kernels,
) -> ForwardPass:
    """A pass over tokens at ``positions`` through layers of these descriptions."""
    ropes = dict.fromkeys(rope for layer in layers for rope in layer.mixer.ropes)
    angles = {rope: rope_angles(rope, positions) for rope in ropes}
    return ForwardPass(attend=attend, ropes=angles, eps=eps, layout=layout, kernels=kernels)


@jax.named_scope("norm")
def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, in float32. No weight: identity."""
    return x if weight is None else rms_norm_reference(x, weight, eps)


@jax.named_scope("activation")
def swiglu(gate_up: Array) -> Array:
    """[..., 2, F] -> [..., F]"""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
