"""Rotation and cache write on Hopper GPUs: one warpgroup per token and KV head."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.float8 import to_bytes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.pages import LayerPages
from pallas_kernels.products import total_f32
from pallas_kernels.rope_kv_write.reference import HeadNorms


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def rope_kv_write_mosaic(
    partials: Array,  # [S, B, T, G, R, D]
    rope: Array,
    norms: HeadNorms,
    pages: LayerPages,
    slots: Array,
    *,
    eps: float,
    dtype: jnp.dtype | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See pallas_kernels.rope_kv_write.rope_kv_write; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_splits, _, _, kv_heads, rows, head_dim = partials.shape
    batch, num_tokens = slots.shape
    group, page_size, tokens = rows - 2, pages.k.shape[2], batch * num_tokens
    pairs = rope.shape[-1]
    # How far the partners of entries are: of all, or of the first half and of the second.
    shifts = (pairs,) if 2 * pairs == head_dim else (pairs, head_dim - pairs)
    dtype = pages.k.dtype if dtype is None else dtype
    weights = [weight for weight in norms if weight is not None]
    scales = [scale for scale in (pages.k_scale, pages.v_scale) if scale is not None]

    @fixed_name(interpret)
    def rope_kv_write_kernel(*refs):
        partials_ref, rope_ref, slots_ref, k_ref, v_ref, *more, q_ref, rotation_buffer = refs
        norm_refs, scale_refs = more[: len(weights)], more[len(weights) :]
        token, head = kernel_axes.index("token"), kernel_axes.index("kv_head")
        page, offset = slots_ref[token] // page_size, slots_ref[token] % page_size
        loaded = [
            [plgpu.load(partials_ref.at[split, token, head, row]) for split in range(num_splits)]
            for row in range(rows)
        ]
        cos, *sines = (plgpu.load(rope_ref.at[token, index]) for index in range(1 + len(shifts)))
        q_weight = None if norms.q is None else plgpu.load(norm_refs[0])
        k_weight = None if norms.k is None else plgpu.load(norm_refs[-1])
        heads = [total_f32(row).astype(dtype) for row in loaded]
        k_by, v_by = (scale_ref[head] for scale_ref in scale_refs) if scales else (None, None)
        v_ref[page, head, offset] = _stored(heads.pop(), v_by)
        for row, x in enumerate(heads):
            weight = q_weight if row < group else k_weight
            heads[row] = x if weight is None else _rms_norm(x, weight, eps)
            # Written twice in a row: reading from an entry on gives the head moved around by that.
            for copy in range(2):
                rotation_buffer[row, pl.ds(copy * head_dim, head_dim)] = heads[row]
        plgpu.commit_smem()
        for row, x in enumerate(heads):
            others = [
                plgpu.load(rotation_buffer.at[row, pl.ds(shift, head_dim)]) for shift in shifts
            ]
            rotated = x.astype(jnp.float32) * cos
            for other, sin in zip(others, sines, strict=True):
                rotated += other.astype(jnp.float32) * sin
            if row < group:
                q_ref[token, head * group + row] = rotated.astype(dtype)
            else:
                k_ref[page, head, offset] = _stored(rotated.astype(dtype), k_by)

    kernel = plgpu.kernel(
        rope_kv_write_kernel,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads * group, head_dim), dtype),
        scratch_types=[plgpu.SMEM((rows - 1, 2 * head_dim), dtype)],
        grid=(kv_heads, tokens),
        grid_names=kernel_axes.names("kv_head", "token"),
        interpret=interpret,
    )
    k_ref, v_ref = jax.new_ref(pages.k), jax.new_ref(pages.v)
    q = kernel(
        partials.reshape(num_splits, -1, kv_heads, rows, head_dim),
        _factors(rope, head_dim).reshape(tokens, -1, head_dim),
        slots.reshape(tokens),
        k_ref,
        v_ref,
        *weights,
        *scales,
    )
    return q.reshape(batch, num_tokens, -1, head_dim), jax.freeze(k_ref), jax.freeze(v_ref)


def _factors(rope: Array, head_dim: int) -> Array:
    """What entries of a head are multiplied with, and their partners, [B, T, 2 or 3, D]: the first
    and the second half of the rotated entries have partners' factors of their own if others follow.
    """
    *tokens, _, _, pairs = rope.shape
    if 2 * pairs == head_dim:
        return rope
    first, second, others = (jnp.zeros((*tokens, n)) for n in (pairs, pairs, head_dim - 2 * pairs))
    cos, sin = rope[:, :, 0], rope[:, :, 1]
    factors = [
        [cos[:, :, 0], cos[:, :, 1], others + 1],
        [sin[:, :, 0], second, others],
        [first, sin[:, :, 1], others],
    ]
    return jnp.stack([jnp.concatenate(parts, axis=-1) for parts in factors], axis=2)


def _stored(x: Array, scale: Array | None) -> Array:
    """A key or a value [D] as pages hold it."""
    return x if scale is None else to_bytes(x.astype(jnp.float32) / scale)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """The norm of the reference, which rounds at the same places: x and weight [D]."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / x.size + eps)
    return (wide * scale).astype(x.dtype) * weight
