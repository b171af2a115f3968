"""AWQ: before rounding, weights of inputs that matter are scaled up, and their inputs down.

Lin et al.: AWQ, arXiv 2306.00978, as published in AutoAWQ. Two searches: a scale for each input
of the projections that share it, and then, for each group of weights, a limit to clip them at.
"""

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.quantize.rounding import Grid, as_rounded, by_group, fit, nearest

RATIOS = 20  # of the search for scales: 0, 1/20, ...
SMALLEST = 1e-4
CLIP_STEPS = 20  # limits from the largest weight ...
CLIP_END = 0.5  # ... down to this share of it


def candidate_scales(weight: Array, mean_input: Array, grid: Grid) -> Array:
    """Scales of inputs to try, float32 [1 + RATIOS, in]; the first are all 1.

    ``weight`` [out, in]: all projections that share the input; ``mean_input`` [in]: mean |x|.
    The others are x^r / w^(1 - r), of each ratio r, where w is the mean over outputs of |weight|,
    as a share of the largest in its group. Each is divided by the geometric mean of its ends.
    """
    grouped = jnp.abs(by_group(weight, grid))
    share = grouped / (jnp.max(grouped, axis=-1, keepdims=True) + 1e-6)
    mean_weight = share.reshape(weight.shape).mean(0)
    ratio = jnp.arange(RATIOS)[:, None] / RATIOS
    scales = mean_input**ratio / (mean_weight ** (1 - ratio) + SMALLEST)
    scales = jnp.maximum(scales, SMALLEST)
    ends = jnp.max(scales, 1, keepdims=True) * jnp.min(scales, 1, keepdims=True)
    scales = scales / jnp.sqrt(ends)
    return jnp.concatenate([jnp.ones_like(scales[:1]), scales])


def rounded_under_scale(weight: Array, scale: Array, grid: Grid) -> Array:
    """What weights [out, in] become, in effect, when they are rounded after scaling [in]."""
    return as_rounded(weight * scale, grid) / scale


def scale_errors(weight: Array, hessian: Array, scales: Array, grid: Grid) -> Array:
    """Squared change of a projection's outputs under each candidate, summed: float32 [C].

    ``hessian`` [in, in]: the sum of x xᵀ over inputs.
    """

    def error(scale: Array) -> Array:
        change = rounded_under_scale(weight, scale, grid) - weight
        return jnp.sum(jnp.matmul(change, hessian, precision="highest") * change)

    return lax.map(error, scales)


def clip_limits(weight: Array, hessian: Array, grid: Grid) -> Array:
    """The best limit of each group, float32 [out, n]: that of the least squared change in what the
    group adds to its output.

    With G the part of ``hessian`` [in, in] that belongs to a group, the change of its weights by d
    costs d G dᵀ: nothing but these parts is needed of the inputs.
    """
    grouped = by_group(weight, grid)  # [out, n, group]
    count, size = grouped.shape[1:]
    blocks = hessian.reshape(count, size, count, size)
    diagonal = blocks[jnp.arange(count), :, jnp.arange(count)]  # [n, group, group]
    largest = jnp.max(jnp.abs(grouped), axis=-1)

    def error(limit: Array) -> Array:
        clipped = jnp.clip(grouped, -limit[..., None], limit[..., None])
        scale, zero = (part[..., None] for part in fit(clipped, grid))
        change = (nearest(clipped, scale, zero, grid) - zero) * scale - grouped
        product = jnp.einsum("ong,ngh->onh", change, diagonal, precision="highest")
        return jnp.sum(product * change, axis=-1)

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        least, limits = best
        limit = largest * (1 - (1 - CLIP_END) * i / CLIP_STEPS)
        found = error(limit)
        return jnp.minimum(found, least), jnp.where(found < least, limit, limits)

    first = (error(largest), largest)
    return lax.fori_loop(1, CLIP_STEPS, step, first)[1]
