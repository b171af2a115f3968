"""Quantizes the projections of one layer: rounding to nearest, AWQ, GPTQ."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.quantizer.awq import candidate_scales, clip_limits, rounded_under_scale, scale_errors
from jaxspec.quantizer.gptq import GptqConfig, gptq
from jaxspec.quantizer.layers import (
    SHARED,
    Batch,
    InputStatistics,
    LayerKind,
    Shared,
    Tensors,
    block_output,
    inputs_of,
    observe,
)
from jaxspec.quantizer.rounding import Grid, Rounded, output_error, round_to_nearest

Method = Literal["rtn", "awq", "gptq", "fp8"]
NOT_CLIPPED = ("self_attn.q_proj", "self_attn.k_proj")  # as published: their products matter


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """What becomes of a layer.

    Attributes:
      projections: the quantized ones, by name.
      changed: norms and biases that scales were moved into, by name.
      errors: of each projection, the mean square of the change in its outputs over the calibration
        text, divided by their mean square.
    """

    projections: dict[str, Rounded]
    changed: dict[str, Array]
    errors: dict[str, float]

    def applied(self, tensors: Tensors) -> dict[str, Array]:
        """The layer's tensors, as the quantized checkpoint means them."""
        dense = {f"{name}.weight": one.dense() for name, one in self.projections.items()}
        return {**tensors, **self.changed, **dense}


def quantize_layer(
    method: Method,
    tensors: Tensors,
    batches: Sequence[Batch],
    kind: LayerKind,
    grid: Grid,
    config: GptqConfig,
) -> QuantizedLayer:
    """Quantize all projections of a layer, given the hidden states before it."""
    match method:
        case "gptq":
            return by_gptq(tensors, batches, kind, grid, config)
        case "awq":
            return by_awq(tensors, batches, kind, grid)
        case "rtn":
            return by_rounding(tensors, batches, kind, grid)
    raise ValueError(f"method {method} needs no calibration")


def by_rounding(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, grid: Grid
) -> QuantizedLayer:
    found = QuantizedLayer({}, {}, {})
    for shared in SHARED:
        inputs = observe(tensors, batches, kind, shared)
        for name in shared.projections:
            weight = weight_of(tensors, name)
            _add(found, name, weight, round_to_nearest(weight, grid), inputs.hessian)
    return found


def by_gptq(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, grid: Grid, config: GptqConfig
) -> QuantizedLayer:
    """Each projection is calibrated on what the ones before it, already quantized, give."""
    found = QuantizedLayer({}, {}, {})
    for shared in SHARED:
        inputs = observe(found.applied(tensors), batches, kind, shared)
        for name in shared.projections:
            weight = weight_of(tensors, name)
            _add(found, name, weight, gptq(weight, inputs.hessian, grid, config), inputs.hessian)
    return found


def by_awq(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, grid: Grid
) -> QuantizedLayer:
    """All scales are searched for on the layer as it is, then applied; then weights are clipped."""
    statistics = {shared: observe(tensors, batches, kind, shared) for shared in SHARED}
    scales: dict[Shared, Array] = {}
    for shared in SHARED:
        if _can_scale(tensors, shared):
            scale = best_scale(tensors, batches, kind, shared, statistics[shared], grid)
            scales[shared] = exact_scale(tensors[f"{shared.before}.weight"], scale)
    scaled = dict(tensors)
    for shared, scale in scales.items():
        scaled = apply_scale(scaled, shared, scale)
    weights = {f"{name}.weight" for shared in SHARED for name in shared.projections}
    changed = {n: own for n, own in scaled.items() if own is not tensors[n] and n not in weights}
    found = QuantizedLayer({}, changed, {})
    for shared in SHARED:
        hessian = statistics[shared].hessian
        if shared in scales:
            hessian = hessian / jnp.outer(scales[shared], scales[shared])
        for name in shared.projections:
            weight, limit = weight_of(scaled, name), None
            if name not in NOT_CLIPPED:
                limit = clip_limits(weight, hessian, grid)
            _add(found, name, weight, round_to_nearest(weight, grid, limit), hessian)
    return found


def _can_scale(tensors: Tensors, shared: Shared) -> bool:
    """Whether the inputs are outputs of what is before, one by one; under grouped heads, several
    inputs of the output projection are copies of one."""
    before, weight = (tensors[f"{name}.weight"] for name in (shared.before, shared.projections[0]))
    return len(before) == weight.shape[1]


def best_scale(
    tensors: Tensors,
    batches: Sequence[Batch],
    kind: LayerKind,
    shared: Shared,
    inputs: InputStatistics,
    grid: Grid,
) -> Array:
    """Scales [in] with the least squared change in what the projections' block computes."""
    together = jnp.concatenate([weight_of(tensors, name) for name in shared.projections])
    candidates = candidate_scales(together, inputs.magnitude / inputs.count, grid)
    if shared.block is None:
        errors = scale_errors(together, inputs.hessian, candidates, grid)
    else:
        errors = jnp.zeros(len(candidates))
        for batch in batches:
            normed = inputs_of(tensors, batch.states, kind, shared)
            errors += block_errors(tensors, normed, batch.valid, candidates, kind, shared, grid)
    return candidates[jnp.argmin(errors)]


@functools.partial(jax.jit, static_argnames=("kind", "shared", "grid"))
def block_errors(
    tensors: Tensors,
    normed: Array,
    valid: Array,
    candidates: Array,
    kind: LayerKind,
    shared: Shared,
    grid: Grid,
) -> Array:
    """Squared change of a block's output under each candidate, summed over tokens: float32 [C]."""
    wanted = block_output(tensors, normed, kind, shared)

    def error(scale: Array) -> Array:
        own = {
            f"{name}.weight": rounded_under_scale(weight_of(tensors, name), scale, grid)
            for name in shared.projections
        }
        change = block_output({**tensors, **own}, normed, kind, shared) - wanted
        return jnp.sum(jnp.where(valid[..., None], change * change, 0.0))

    return lax.map(error, candidates)


def exact_scale(before: Array, scale: Array) -> Array:
    """The scale [in] by which inputs are in fact divided, where a norm [in] is stored divided by
    ``scale`` and so rounded to its dtype. A projection is stored as it is quantized anyway."""
    if before.ndim > 1:
        return scale
    divided = (before / scale).astype(before.dtype)
    exact = before.astype(jnp.float32) / divided.astype(jnp.float32)
    return jnp.where(divided == 0, scale, exact)


def apply_scale(tensors: Tensors, shared: Shared, scale: Array) -> dict[str, Array]:
    """Weights times the scale [in] of their inputs, and what gives the inputs divided by it."""
    weights = {f"{name}.weight": weight_of(tensors, name) * scale for name in shared.projections}
    changed = {**tensors, **weights}
    before, bias = f"{shared.before}.weight", f"{shared.before}.bias"
    if tensors[before].ndim > 1:
        changed[before] = weight_of(tensors, shared.before) / scale[:, None]
    else:
        changed[before] = (tensors[before] / scale).astype(tensors[before].dtype)
    if bias in tensors:
        changed[bias] = (tensors[bias] / scale).astype(tensors[bias].dtype)
    return changed


def weight_of(tensors: Tensors, name: str) -> Array:
    """A projection's weights [out, in] in float32."""
    return tensors[f"{name}.weight"].astype(jnp.float32)


def _add(
    found: QuantizedLayer, name: str, weight: Array, quantized: Rounded, hessian: Array
) -> None:
    found.projections[name] = quantized
    found.errors[name] = float(output_error(weight, quantized.dense(), hessian))
    if not np.isfinite(found.errors[name]):
        raise ValueError(f"{name}: calibration gave inputs that are not finite")
