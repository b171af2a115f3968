"""What the layers of a model share during one forward pass.

Of model code only this file, attention.py, sparse_choice.py, entry_heads.py, readers.py,
one_launch.py and mlps/slots.py call kernels by operation name. Here are those of norms,
activations, experts and the search for the largest scores; attention.py calls those that read or
write pages, sparse_choice.py and entry_heads.py what stands for them where positions are chosen or
entries made (it is jnp so far), readers.py norms that round, one_launch.py those of several blocks
of a layer, and mlps/slots.py those of experts in an engine.
Mixers and MLPs name none: they hand Products to the methods of a ForwardPass, and the heads of
attention_heads.py to its ``attend``. (A Linear has a product of its own, which may be a kernel: see
linear.py and quantized/.)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import KVScales
from jaxspec.config.experts import ExpertActivation, SquaredRelu
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import Activation
from jaxspec.config.model import LayerConfig
from jaxspec.config.rope import QueryScaling, RopeConfig
from jaxspec.models.activations import clamp_of, gated
from jaxspec.models.attention_heads import Heads, QueryHeads, times
from jaxspec.models.linear import (
    Addend,
    AnyLinear,
    ChosenSum,
    Computed,
    Product,
    ReadsRounded,
    RoundedRows,
    takes_none,
)
from jaxspec.models.norms import layer_norm, norm_all_heads, norms_before_rope, rms_norm
from jaxspec.models.readers import OneReader, norm_for
from jaxspec.models.rope import query_factors, rope_angles
from jaxspec.parallel import Layout
from jaxspec.parallel.collectives import all_tokens
from pallas_kernels import gated_norm
from pallas_kernels.add_rms_norm import add_rms_norm, takes_partials
from pallas_kernels.add_rms_norm.reference import followed_by
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_product import expert_product
from pallas_kernels.expert_product import misfit as expert_misfit
from pallas_kernels.packed_expert_product import misfit as packed_expert_misfit
from pallas_kernels.packed_expert_product import packed_expert_product
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.products import added_up, sum_partials
from pallas_kernels.reduce_add_rms_norm import misfit, reduce_add_rms_norm
from pallas_kernels.reduce_add_rms_norm import takes_partials as exchange_takes_partials
from pallas_kernels.rope_kv_write import takes_pairs
from pallas_kernels.rope_kv_write import takes_partials as heads_take_partials
from pallas_kernels.rope_kv_write.reference import apply_rope
from pallas_kernels.round_tokens import round_gated
from pallas_kernels.selection import Kernels
from pallas_kernels.top_k import top_k

# How tokens attend to the past: (layer's state, one of the inputs in attention_heads.py, window) ->
# (output [B, T, Q, D], of latent attention the values', of an indexer LatentHeads.chosen; state)
Attend = Callable[[Any, Any, int | None], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """What all layers share during one forward pass.

    Attributes:
      attend: how the tokens attend to the past. In an engine it is a PagedAttend; a mixer that is
        not attention reads the tokens' rows, slots and positions from it.
      ropes: results of ``rope_angles``, by rope config.
      query_factors: results of the function of that name, by its config.
      eps: epsilon of the norms.
      isolate_blocks: XLA fuses nothing over the residual stream between two blocks. A block then
        rounds alike in all programs that contain it.
      exchange: memory in which devices add up row-parallel products, on a single device in which
        thread blocks meet (see decoding/all_reduce_buffers.py); or None.
      centred: norms of hidden states subtract the mean first. No kernel does.
      token_ids: int [B, T], of MLPs and layers that read them; None: not known.
    """

    attend: Attend
    ropes: Mapping[RopeConfig, Array]
    query_factors: Mapping[QueryScaling, Array]
    eps: float
    layout: Layout
    kernels: Kernels
    isolate_blocks: bool = False
    exchange: Array | None = None
    centred: bool = False
    token_ids: Array | None = None

    def ids_of_rows(self, count: int) -> Array:
        """The ids [N] of the pass's tokens. Raises ValueError where they are not known, or are not
        those of so many rows."""
        ids = self.token_ids
        if ids is None or ids.size != count:
            raise ValueError("layers read token ids, which this pass does not have: it needs all "
                "tokens of a target model on each device")  # fmt: skip
        return ids.reshape(-1)

    def norm(self, x: Array, weight: Array | None) -> Array:
        """The model's norm, of hidden states that may be split."""
        norm = layer_norm if self.centred else rms_norm
        return norm(x, weight, self.eps, self.layout.hidden)

    def add_norm(
        self,
        x: Array,
        product: Addend,
        weight: Array | None,
        reader: AnyLinear | OneReader | None = None,
        beside: Array | None = None,
    ) -> tuple[Array, Any]:
        """(x + product, its norm); without a weight the second is the sum itself.

        ``reader``: what alone reads the norm, or alone rounds it; if it rounds its input, it may
        get RoundedRows of the same launch. ``beside`` [1, R, H]: rows that follow the norm's,
        [1, B * T + R, H] in all.
        """
        if isinstance(product, Product) and weight is not None:
            axis = self._axis_of_kernel(x, product, weight)
            if axis is not None:
                total, normed = self._reduce_add_norm(x, product, weight, axis)
                return total, followed_by(normed, beside)
        partials = self._addends(product, weight)
        with jax.named_scope("norm"):
            if self.isolate_blocks:
                partials = lax.optimization_barrier(partials)
            if weight is None or self.layout.hidden or self.centred:  # no kernel norms so
                assert not isinstance(partials, ChosenProducts), "the kernel takes them"
                total = x + sum_partials(partials, len(x), x.dtype)
                both = total, followed_by(self.norm(total, weight), beside)
            else:
                how = self.eps, self.kernels.implementation("add_rms_norm")
                rounds = functools.partial(self._rounds, "add_rms_norm", x)
                if beside is None:
                    both = norm_for(reader, rounds, x, partials, weight, *how)
                else:
                    both = add_rms_norm(x, partials, weight, *how, beside)
            return lax.optimization_barrier(both) if self.isolate_blocks else both

    def _addends(self, product: Addend, weight: Array | None) -> Array | ChosenProducts:
        """Partial sums of what is added before a norm, or products that its kernel adds up."""
        taking = self._taking("add_rms_norm", takes_partials)
        normed = weight is not None and not self.centred
        if normed and isinstance(product, ChosenSum) and taking(*product.row):
            return product.products
        return product.partial_sums(self.layout, self.kernels, taking)

    def gated(self, gate_up: Array, activation: Activation, reader: AnyLinear) -> Any:
        """Hidden units [B, T, F] of gate and up [B, T, 2, F], or of up alone [B, T, 1, F], which
        ``reader`` alone reads: if it rounds its input, they may be RoundedRows of one launch."""
        if activation != "silu" or not self._rounds("round_tokens", gate_up, reader):
            return gated(gate_up, activation)
        *tokens, _, width = gate_up.shape
        with jax.named_scope("activation"):
            values, scale = round_gated(gate_up.reshape(-1, 2, width), "auto")
        values = values.reshape(*tokens, width)
        return RoundedRows(values=values, scale=scale, dtype=gate_up.dtype)

    def gated_heads(self, x: Array, projected: Array, norm: Array, reader: AnyLinear) -> Any:
        """Heads [B, T, G, r, D] normed, times SiLU of their gates, which are last in ``projected``
        [B, T, G, w]: [B, T, G * r * D], which ``reader`` alone reads, as ``gated``."""
        shape, (groups, heads) = x.shape[:2], x.shape[2:4]
        rows = x.reshape(-1, *x.shape[2:]), projected.reshape(-1, *projected.shape[2:])
        how = norm, self.eps, self.kernels.implementation("gated_norm")
        fits = gated_norm.misfit(*rows) is None
        if not fits or not self._rounds("gated_norm", projected, reader, groups * heads):
            return gated_norm.gated_norm(*rows, *how).reshape(*shape, -1)
        values, scale = gated_norm.gated_norm_rounded(*rows, *how)
        return RoundedRows(values=values.reshape(*shape, -1), scale=scale, dtype=projected.dtype)

    def _rounds(
        self, operation: str, x: Array, reader: AnyLinear | None, num_groups: int = 1
    ) -> bool:
        """Whether the kernel of this operation also rounds its result for ``reader``."""
        if operation not in self.kernels or self.layout.tokens or self.layout.hidden:
            return False
        if not isinstance(reader, ReadsRounded):
            return False
        return reader.reads_rounded(x.dtype, self.kernels, num_groups)

    def scaled(self, x: Array, addend: Addend, norm: Array | None, scale: float) -> Addend:
        """What is added to the residual stream x [B, T, H], normed and multiplied first; as it is
        without a norm and with a scale of 1."""
        if norm is None and scale == 1:
            return addend
        value = self.normed(x, addend, norm)
        return Computed(value if scale == 1 else value * scale)

    def normed(self, x: Array, addend: Addend, norm: Array | None) -> Array:
        """The sum of what is added to the residual stream x [B, T, H], normed; as it is without a
        norm."""
        partials = addend.partial_sums(self.layout, self.kernels, takes_none)
        if self.isolate_blocks:
            partials = lax.optimization_barrier(partials)
        return self.norm(sum_partials(partials, len(x), x.dtype), norm)

    def summed(self, x: Array, addend: Addend) -> Array:
        """What is added to the residual stream x [B, T, H], for an elementwise reader: its fusion
        adds up partial sums, where narrow products are split for the norms' kernel, too."""
        taking = self._taking("add_rms_norm", takes_partials)
        partials = addend.partial_sums(self.layout, self.kernels, taking)
        if self.isolate_blocks:
            partials = lax.optimization_barrier(partials)
        return added_up(partials, len(x)).astype(x.dtype)

    def rescaled(self, x: Array, addend: Addend, factor: Array | None) -> tuple[Array, Addend]:
        """The residual stream x [B, T, H] and what is added to it, both times a ``factor`` [1];
        as they are without one."""
        if factor is None:
            return x, addend
        value = self.normed(x, addend, None) * factor
        if self.isolate_blocks:
            return lax.optimization_barrier(lax.optimization_barrier(x) * factor), Computed(value)
        return x * factor, Computed(value)

    def _axis_of_kernel(self, x: Array, product: Product, weight: Array) -> str | None:
        """The mesh axis over which a kernel sums the product while it adds and norms, if any."""
        axes = product.input_axes(self.layout)
        if "reduce_add_rms_norm" not in self.kernels or len(axes) != 1:
            return None
        if self.layout.hidden or self.layout.tokens or self.centred:
            return None
        if product.linear.bias is not None or misfit(x, weight, axes[0], self.exchange):
            return None
        return axes[0]

    def _reduce_add_norm(
        self, x: Array, product: Product, weight: Array, axis: str
    ) -> tuple[Array, Array]:
        taking = self._taking("reduce_add_rms_norm", exchange_takes_partials)
        partials = product.local_sums(self.kernels, taking)
        with jax.named_scope("norm"):
            if self.isolate_blocks:
                partials = lax.optimization_barrier(partials)
            how = self.eps, axis, self.exchange, "mosaic_gpu"
            both = reduce_add_rms_norm(x, partials, weight, *how)
            return lax.optimization_barrier(both) if self.isolate_blocks else both

    def heads(
        self,
        product: Addend,
        dtype: jnp.dtype,
        config: AttentionConfig,
        q_norm: Array | None,
        k_norm: Array | None,
        kv_scales: KVScales | None = None,
        qk_norm: Array | None = None,
        sinks: Array | None = None,
    ) -> Heads:
        """The heads of a qkv projection, not yet normed and rotated. ``dtype`` is that of sums.

        ``qk_norm``: weights [G, R - 1, D] of a norm over all query heads, and one over all key
        heads. They are normed with it here.
        """
        angles = self.ropes[config.rope]
        fits = qk_norm is None and takes_pairs(angles.shape[-1])  # else the kernel does not run
        taking = self._taking("rope_kv_write", heads_take_partials if fits else takes_none)
        partials = product.partial_sums(self.layout, self.kernels, taking)
        if qk_norm is not None:
            axes = self.layout.axes("kv_heads")
            partials = norm_all_heads(partials[0], qk_norm, self.eps, axes)[None]
        query_scale = self._query_scale(config.rope)
        if config.norm_after_rope and q_norm is not None and k_norm is not None:
            q_norm, weights = norms_before_rope(q_norm, k_norm)
            k_norm, query_scale = q_norm, weights if query_scale is None else query_scale * weights
        return Heads(
            partials=partials,
            dtype=dtype,
            rope=angles,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            kernels=self.kernels,
            kv_scales=kv_scales,
            scale=config.scale,
            softcap=config.softcap,
            chunk=config.chunk,
            sinks=sinks,
            tokens=self.layout.sequence if self.layout.tokens else (),
            query_scale=query_scale,
        )

    def queries(
        self,
        product: Product,
        config: AttentionConfig,
        q_norm: Array | None,
        kv_scales: KVScales | None,
    ) -> QueryHeads:
        """The heads of a projection to queries alone [B, T, Q, D], normed and rotated, which attend
        to keys and values of another layer."""
        angles = self.ropes[config.rope]
        queries = product.result(self.layout, self.kernels)
        count = queries.shape[1] if self.layout.tokens else None
        if count is not None:
            queries = all_tokens(queries, self.layout.sequence, angles.shape[1])
        queries = self.rotated(rms_norm(queries, q_norm, self.eps), config.rope)
        queries = self.scaled_queries(queries, config.rope)
        how = self.kernels, kv_scales, config.scale, config.softcap
        return QueryHeads(queries, *how, count)

    def _query_scale(self, rope: RopeConfig) -> Array | None:
        """[B, T, 1, 1]"""
        scaling = rope.query_scaling
        return None if scaling is None else self.query_factors[scaling][..., None, None]

    def scaled_queries(self, queries: Array, rope: RopeConfig) -> Array:
        """Queries [B, T, Q, D] of whole heads, rotated or not, times what their positions say."""
        scale = self._query_scale(rope)
        return queries if scale is None else times(queries, scale)

    def rotated(self, x: Array, rope: RopeConfig) -> Array:
        """Heads [B, T, R, D], rotated."""
        return apply_rope(x[:, :, None], self.ropes[rope])[:, :, 0]

    def top_k(self, x: Array, k: int) -> tuple[Array, Array, Array]:
        """The k largest entries of rows [N, n], the lower index first of equal ones, their indices,
        and the rows' log-sum-exps."""
        return top_k(x, k, self.kernels.implementation("top_k"))

    def expert_product(
        self,
        x: Array,
        experts: Array,
        gate_up: Array,
        down: Array,
        bias: Array | None,
        activation: ExpertActivation | None,
    ) -> Array | None:
        """What each chosen expert makes of rows x [N, H], see pallas_kernels.expert_product; None
        where no kernel does it."""
        if isinstance(activation, SquaredRelu) or "expert_product" not in self.kernels:
            return None
        if expert_misfit(x, gate_up, down, bias):
            return None
        clamp = activation and clamp_of(activation)
        how = self.kernels.implementation("expert_product")
        return expert_product(x, experts, gate_up, down, bias, clamp=clamp, implementation=how)

    def packed_expert_product(
        self,
        x: Array,
        experts: Array,
        gate_up: PackedExperts,
        down: PackedExperts,
        bias: Array | None,
        activation: ExpertActivation | None,
    ) -> Array | None:
        """``expert_product`` of experts of 4 or 8 bits."""
        operation = "packed_expert_product"
        if isinstance(activation, SquaredRelu) or operation not in self.kernels:
            return None
        if packed_expert_misfit(x, gate_up, down, bias):
            return None
        clamp, how = activation and clamp_of(activation), self.kernels.implementation(operation)
        return packed_expert_product(
            x, experts, gate_up, down, bias, clamp=clamp, implementation=how
        )

    def _taking(
        self, operation: str, fits: Callable[[jnp.dtype, int], bool]
    ) -> Callable[[jnp.dtype, int], bool]:
        """``fits`` if the operation runs as a kernel, else a function that always says no: the jnp
        reference takes no partial sums."""
        return fits if operation in self.kernels else takes_none


def make_pass(
    layers: Iterable[LayerConfig],
    positions: Array,  # [B, T] rotary positions
    attend: Attend,
    eps: float,
    layout: Layout,
    kernels: Kernels,
    *,
    isolate_blocks: bool = False,
    exchange: Array | None = None,
) -> ForwardPass:
    """A pass over tokens at ``positions`` through layers with these configs."""
    layers = tuple(layers)
    mixers = (mixer for layer in layers for mixer in layer.mixers)
    ropes = dict.fromkeys(rope for mixer in mixers for rope in mixer.ropes)
    scalings = dict.fromkeys(rope.query_scaling for rope in ropes if rope.query_scaling)
    angles = [rope_angles(rope, positions) for rope in ropes]
    if isolate_blocks:
        angles = lax.optimization_barrier(angles)
    by_rope = dict(zip(ropes, angles, strict=True))
    factors = {scaling: query_factors(scaling, positions) for scaling in scalings}
    shared = attend, by_rope, factors, eps, layout, kernels
    centred = any(layer.centred for layer in layers)
    return ForwardPass(*shared, isolate_blocks, exchange, centred)
