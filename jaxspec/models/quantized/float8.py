"""Weights and activations of 8-bit floats (e4m3): their products are those that tensor cores have.

Weights have a scale for each output, or for each output and a group of inputs. Activations are
rounded when they are used, with a scale for each token, or for each token and as many inputs; or
with one scale for all of them, which the checkpoint has.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.models.linear import Linear
from jaxspec.models.quantized.packed_linear import PackedLinear, rounded_rows
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.models.wrapped_tensors import OutputsFirst
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.o_gate_up_down.weights import PackedWeights
from pallas_kernels.packed_product import packed_product, sizes_misfit
from pallas_kernels.packed_product.reference import dequantized
from pallas_kernels.packed_product.tuning import scaled_rows
from pallas_kernels.products import input_last_product
from pallas_kernels.round_tokens import round_tokens
from pallas_kernels.round_tokens.reference import rounded_by
from pallas_kernels.selection import Kernels

E4M3 = jnp.dtype("float8_e4m3fn")


@pytree
class Float8Linear(PackedLinear):
    """A Linear of the AnyLinear protocol. Arrays hold the input last, as tensor cores read weights.

    Attributes:
      values: e4m3 [*out, in].
      scale: float [n, *out] of n groups of consecutive inputs.
      input_scale: float32 [], of all inputs; n is 1. None: each token has a scale of its own. While
        a checkpoint is read: [*out], those of each projection (see with_one_input_scale).
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    input_scale: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [*out]
    axes: tuple[str, ...] = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        size, *outputs = self.axes
        by_group = (size if len(self.scale) > 1 else "group", *outputs)
        is_read = self.input_scale is not None and self.input_scale.ndim > 0
        return {
            "values": (*outputs, size),
            "scale": by_group,
            "input_scale": tuple(outputs) if is_read else (),
            "bias": tuple(outputs),
        }

    def mapped(self, source: Source, tensor_map: TensorMap) -> "Float8Linear":
        return self.replace(
            values=tensor_map.of_source(OutputsFirst(source), "values", self.values),
            scale=tensor_map.of_source(source, "scale", self.scale),
            input_scale=tensor_map.of_source(source, "inputs", self.input_scale),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )

    def with_one_input_scale(self) -> "Float8Linear":
        """With the largest of the scales that a checkpoint has of the inputs of projections which
        are computed together: they have the same inputs."""
        if self.input_scale is None:
            return self
        return self.replace(input_scale=jnp.max(self.input_scale))

    @property
    def rounds(self) -> bool:
        return True

    def reads_rounded(self, dtype: jnp.dtype, kernels: Kernels, num_groups: int = 1) -> bool:
        if self.input_scale is not None or len(self.scale) != num_groups:
            return False
        return "round_tokens" in kernels and dtype == jnp.bfloat16

    def packed(self) -> PackedWeights | None:
        """The weights [V, in] as kernels read them that round rows themselves; None beside a scale
        that the checkpoint has of them."""
        return None if self.input_scale is not None else PackedWeights(*self._flat())

    @property
    def _bits(self) -> tuple[int, int]:
        return 8, 8

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weights [*out, in], computed in float32 and rounded to ``dtype``."""
        return dequantized(*self._flat()).astype(dtype).reshape(self.values.shape)

    def _multiply(self, x: Any, num_splits: int, kernels: Kernels, dtype: jnp.dtype) -> Array:
        """x [..., in] -> [S, ..., *out], rounded to ``dtype`` once."""
        rounded, x_scale = self._rounded(x, kernels)
        if self._runs_packed(x, kernels):
            how: dict[str, Any] = {"dtype": dtype, "implementation": "mosaic_gpu"}
            weights = *self._flat(), None
            y = packed_product(rounded, *weights, x_scale, num_splits=num_splits, **how)
        else:
            y = _product(rounded, x_scale[:, : len(rounded)], *self._flat(), x.dtype)[None]
        return y.reshape(num_splits, *x.shape[:-1], *self.out_shape).astype(dtype)

    def _rounded(self, x: Any, kernels: Kernels) -> tuple[Array, Array]:
        """e4m3 rows [M, in] and their scales float32 [n, M or more]."""
        if self.input_scale is None:
            return rounded_rows(x, len(self.scale), kernels)
        rows = x.reshape(-1, x.shape[-1])
        rounded = rounded_by(rows.astype(jnp.float32), self.input_scale)
        return rounded, jnp.broadcast_to(self.input_scale, (1, scaled_rows(len(rows))))

    def _flat(self) -> tuple[Array, Array]:
        """Values [V, in] and scale [n, V], with all outputs in one dimension V."""
        num_groups = len(self.scale)
        return self.values.reshape(-1, self.values.shape[-1]), self.scale.reshape(num_groups, -1)

    def _runs_packed(self, x: Any, kernels: Kernels) -> bool:
        if "packed_product" not in kernels or x.dtype != jnp.bfloat16:
            return False
        rows, width, groups = math.prod(x.shape[:-1]), math.prod(self.out_shape), len(self.scale)
        return sizes_misfit(rows, x.shape[-1], width, groups) is None


def _product(x: Array, x_scale: Array, values: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """e4m3 x [M, K] with scales [n, M] times e4m3 values [V, K] with scales [n, V]: float32 [M, V].

    Sums of several groups have several scales: then both sides are widened before.
    """
    if len(scale) == 1:
        y = input_last_product(x, values, jnp.float32)
        return y * x_scale[0][:, None] * scale[0].astype(jnp.float32)
    wide, weights = (
        dequantized(*operand).astype(dtype) for operand in ((x, x_scale), (values, scale))
    )
    return input_last_product(wide, weights, jnp.float32)


def float8_shape(
    linear: Linear, num_groups: int, scale_dtype: jnp.dtype, *, is_static: bool = False
) -> Float8Linear:
    """A Float8Linear of ShapeDtypeStructs in place of a Linear of such.

    ``is_static``: whether its inputs have one scale.
    """
    size, *outputs = linear.weight.shape
    return Float8Linear(
        values=array_shape(*outputs, size, dtype=E4M3),
        scale=array_shape(num_groups, *outputs, dtype=scale_dtype),
        input_scale=array_shape(*outputs, dtype=jnp.dtype("float32"), when=is_static),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def rounded_to_float8(linear: Linear, num_groups: int = 1) -> Float8Linear:
    """The nearest Float8Linear: the largest weight of each group becomes 448."""
    weight = jnp.moveaxis(linear.weight, 0, -1)
    flat = weight.reshape(-1, weight.shape[-1])
    values, scale = round_tokens(flat, num_groups)
    return Float8Linear(
        values=values.reshape(weight.shape),
        scale=scale[:, : len(flat)].reshape(num_groups, *weight.shape[:-1]),
        bias=linear.bias,
        axes=linear.axes,
        activations=jnp.dtype(linear.dtype),
    )


def as_linear(linear: PackedLinear, dtype: jnp.dtype) -> Linear:
    """The Linear whose weights these values stand for, in ``dtype``: to train them."""
    weight, bias = jnp.moveaxis(linear.dense(dtype), -1, 0), linear.bias
    return Linear(
        weight=weight, bias=None if bias is None else bias.astype(dtype), axes=linear.axes
    )
