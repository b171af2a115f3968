"""Quantizes the projections of one layer: rounding to nearest, AWQ, GPTQ."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.quantize.awq import candidate_scales, clip_limits, rounded_under_scale, scale_errors
from jaxspec.quantize.compiled import program
from jaxspec.quantize.gptq import GptqConfig, gptq
from jaxspec.quantize.layers import (
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
from jaxspec.quantize.rounding import Grid, Rounded, output_error, round_to_nearest

Method = Literal["rtn", "awq", "gptq", "fp8"]
# As published: their products matter.
NOT_CLIPPED = frozenset({"self_attn.q_proj", "self_attn.k_proj"})


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
        return {**tensors, **self.changed, **dense_weights(self.projections)}


@program
def dense_weights(projections: dict[str, Rounded]) -> dict[str, Array]:
    """The float32 weights that quantized projections stand for, by their tensors' names."""
    return {f"{name}.weight": projection.dense() for name, projection in projections.items()}


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
    parts: list[Part] = []
    for shared, inputs in zip(SHARED, observe(tensors, batches, kind, SHARED), strict=True):
        weights = weights_of(tensors, shared)
        parts.append(round_part(weights, inputs.hessian, None, grid))
    return joined(parts, {})


def by_gptq(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, grid: Grid, config: GptqConfig
) -> QuantizedLayer:
    """Each projection is calibrated on what the ones before it, already quantized, give."""
    parts, current = list[Part](), dict(tensors)
    for shared in SHARED:
        [inputs] = observe(current, batches, kind, (shared,))
        part = gptq_part(weights_of(tensors, shared), inputs.hessian, grid, config)
        parts.append(part)
        current |= dense_weights(part.projections)
    return joined(parts, {})


def by_awq(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, grid: Grid
) -> QuantizedLayer:
    """All scales are searched for on the layer as it is, then applied; then weights are clipped."""
    statistics = dict(zip(SHARED, observe(tensors, batches, kind, SHARED), strict=True))
    scaling = tuple(shared for shared in SHARED if _can_scale(tensors, shared))
    known = tuple(statistics[shared] for shared in scaling)
    scales, changed = best_scales(tensors, batches, known, kind, scaling, grid)
    scaled, by_group = {**tensors, **changed}, dict(zip(scaling, scales, strict=True))
    parts: list[Part] = []
    for shared in SHARED:
        weights, clipped = weights_of(scaled, shared), set(shared.projections) - NOT_CLIPPED
        hessian, scale = statistics[shared].hessian, by_group.get(shared)
        parts.append(round_part(weights, hessian, scale, grid, frozenset(clipped)))
    names = {f"{name}.weight" for shared in SHARED for name in shared.projections}
    return joined(parts, {name: tensor for name, tensor in changed.items() if name not in names})


class Part(NamedTuple):
    """Quantized projections that share their input, and the errors of their outputs, by name."""

    projections: dict[str, Rounded]
    errors: dict[str, Array]  # float32 [] each, on the device


def joined(parts: Sequence[Part], changed: dict[str, Array]) -> QuantizedLayer:
    """A layer of its parts. Waits for the errors, once for all of them.

    Raises ValueError for errors that are not finite.
    """
    projections = {name: made for part in parts for name, made in part.projections.items()}
    errors = {name: error for part in parts for name, error in part.errors.items()}
    floats = {name: float(error) for name, error in jax.device_get(errors).items()}
    for name, error in floats.items():
        if not np.isfinite(error):
            raise ValueError(f"{name}: calibration gave inputs that are not finite")
    return QuantizedLayer(projections, changed, floats)


@functools.partial(program, static_argnames=("grid", "clipped"))
def round_part(
    weights: dict[str, Array],
    hessian: Array,
    scale: Array | None,
    grid: Grid,
    clipped: frozenset[str] = frozenset(),
) -> Part:
    """Weights [out, in] to the nearest values; those of the projections ``clipped`` within the best
    limits. ``hessian`` [in, in] is that of the inputs before they were divided by ``scale`` [in].
    """
    if scale is not None:
        hessian = hessian / jnp.outer(scale, scale)
    projections: dict[str, Rounded] = {}
    for name, weight in weights.items():
        weight = weight.astype(jnp.float32)
        limit = clip_limits(weight, hessian, grid) if name in clipped else None
        projections[name] = round_to_nearest(weight, grid, limit)
    return Part(projections, _output_errors(weights, projections, hessian))


def gptq_part(weights: dict[str, Array], hessian: Array, grid: Grid, config: GptqConfig) -> Part:
    """Weights [out, in] by GPTQ; ``hessian`` [in, in] is that of their inputs."""
    found = gptq([*weights.values()], hessian, grid, config)
    projections = dict(zip(weights, found, strict=True))
    return Part(projections, output_errors(weights, projections, hessian))


def _output_errors(
    weights: dict[str, Array], projections: dict[str, Rounded], hessian: Array
) -> dict[str, Array]:
    return {
        name: output_error(weight.astype(jnp.float32), projections[name].dense(), hessian)
        for name, weight in weights.items()
    }


output_errors = program(_output_errors)


def _can_scale(tensors: Tensors, shared: Shared) -> bool:
    """Whether the inputs are outputs of what is before, one by one; under grouped heads, several
    inputs of the output projection are copies of one."""
    before, weight = (tensors[f"{name}.weight"] for name in (shared.before, shared.projections[0]))
    return len(before) == weight.shape[1]


def best_scales(
    tensors: Tensors,
    batches: Sequence[Batch],
    statistics: tuple[InputStatistics, ...],
    kind: LayerKind,
    groups: tuple[Shared, ...],
    grid: Grid,
) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """For each group the scales [in] of its inputs with the least squared change in what its block
    computes; and the tensors that change when all are applied. ``statistics`` are of the groups."""
    candidates, errors = _candidates(tensors, statistics, groups, grid)
    for batch in batches:
        errors = _add_block_errors(
            errors, tensors, batch.states, batch.valid, candidates, kind, groups, grid
        )
    return _apply_best(tensors, candidates, errors, groups)


@functools.partial(program, static_argnames=("groups", "grid"))
def _candidates(
    tensors: Tensors,
    statistics: tuple[InputStatistics, ...],
    groups: tuple[Shared, ...],
    grid: Grid,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Scales to try for each group [C, in], and their errors [C]: of groups that serve a block, 0
    as yet."""
    candidates, errors = list[Array](), list[Array]()
    for shared, inputs in zip(groups, statistics, strict=True):
        together = jnp.concatenate([weight_of(tensors, name) for name in shared.projections])
        scales = candidate_scales(together, inputs.magnitude / inputs.count, grid)
        candidates.append(scales)
        if shared.block is None:
            errors.append(scale_errors(together, inputs.hessian, scales, grid))
        else:
            errors.append(jnp.zeros(len(scales)))
    return tuple(candidates), tuple(errors)


@functools.partial(program, static_argnames=("kind", "groups", "grid"))
def _add_block_errors(
    errors: tuple[Array, ...],
    tensors: Tensors,
    states: Array,
    valid: Array,
    candidates: tuple[Array, ...],
    kind: LayerKind,
    groups: tuple[Shared, ...],
    grid: Grid,
) -> tuple[Array, ...]:
    """``errors`` with those of a batch added, of the groups that serve a block."""
    found = list(errors)
    for i, (shared, inputs) in enumerate(
        zip(groups, inputs_of(tensors, states, kind, groups), strict=True)
    ):
        if shared.block is not None:
            found[i] += block_errors(tensors, inputs, valid, candidates[i], kind, shared, grid)
    return tuple(found)


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
        tried = {
            f"{name}.weight": rounded_under_scale(weight_of(tensors, name), scale, grid)
            for name in shared.projections
        }
        change = block_output({**tensors, **tried}, normed, kind, shared) - wanted
        return jnp.sum(jnp.where(valid[..., None], change * change, 0.0))

    return lax.map(error, candidates)


@functools.partial(program, static_argnames=("groups",))
def _apply_best(
    tensors: Tensors,
    candidates: tuple[Array, ...],
    errors: tuple[Array, ...],
    groups: tuple[Shared, ...],
) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """See best_scales."""
    scaled, scales = dict(tensors), list[Array]()
    for shared, tried, error in zip(groups, candidates, errors, strict=True):
        scales.append(exact_scale(tensors[f"{shared.before}.weight"], tried[jnp.argmin(error)]))
        scaled = apply_scale(scaled, shared, scales[-1])
    changed = {name: tensor for name, tensor in scaled.items() if tensor is not tensors[name]}
    return tuple(scales), changed


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


def weights_of(tensors: Tensors, shared: Shared) -> dict[str, Array]:
    """Weights [out, in] as they are stored, by the names of the projections."""
    return {name: tensors[f"{name}.weight"] for name in shared.projections}
