"""What several blocks of a layer compute in one launch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear, Product, ReadsRounded, RoundedRows
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.readers import OneReader
from jaxspec.parallel import WHOLE, Layout
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down import misfit, o_gate_up_down, o_to_norm, o_to_norm_rounded
from pallas_kernels.o_gate_up_down.weights import Following, LayerWeights, PackedWeights
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class SplitSums:
    """An Addend of which partial sums are computed already: float32 [S, B, T, H]."""

    partials: Array

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        return self.partials


@dataclasses.dataclass(frozen=True)
class LayerLaunch:
    """The rest of a layer after its mixer, in one launch: the projection of what was mixed, the
    residual stream and its norm, and an MLP: SiLU of gate, times up, times down.

    Attributes:
      x: [B, T, H], the residual stream before it.
      mixed: [B, T, in], what the projection reads.
    """

    step: ForwardPass
    x: Array
    mixed: Array
    weights: LayerWeights

    def partial_sums(self) -> tuple[Array, Addend]:
        """The residual stream before the MLP, and what the MLP adds to it."""
        rows, stream, *how = self._arguments()
        with jax.named_scope("mlp"):
            total, partials = o_gate_up_down(rows, stream, self.weights, *how)
        added = SplitSums(partials.reshape(len(partials), *self.x.shape))
        return total.reshape(self.x.shape), added

    def can_norm(
        self, norm: Array | None, reader: AnyLinear | OneReader | None, beside: Array | None
    ) -> bool:
        """Whether the launch may go on to the norm that follows (see ForwardPass.add_norm)."""
        if "o_to_norm" not in self.step.kernels or norm is None or norm.dtype != self.x.dtype:
            return False
        if isinstance(reader, OneReader):
            return False
        rounds = isinstance(reader, ReadsRounded) and reader.rounds
        return not rounds or (beside is None and self._rounds_for(reader))

    def normed(
        self, norm: Array, reader: AnyLinear | None, beside: Array | None
    ) -> tuple[Array, Any]:
        """The residual stream behind the MLP, and its norm with the rows beside it, which
        ``reader`` alone reads: if it rounds its input, RoundedRows."""
        following = Following(norm, None if beside is None else beside[0])
        rows, stream, *how = self._arguments()
        given, shape = (rows, stream, self.weights, following, *how), self.x.shape
        with jax.named_scope("mlp"):
            if not self._rounds_for(reader):
                total, normed = o_to_norm(*given)
                with_rows = shape if beside is None else (1, *normed.shape)
                return total.reshape(shape), normed.reshape(with_rows)
            total, values, scale = o_to_norm_rounded(*given)
        values = values.reshape(shape)
        return total.reshape(shape), RoundedRows(values=values, scale=scale, dtype=self.x.dtype)

    def _rounds_for(self, reader: AnyLinear | OneReader | None) -> bool:
        if not isinstance(reader, ReadsRounded):
            return False
        return reader.reads_rounded(self.x.dtype, self.step.kernels)

    def _arguments(self) -> tuple[Any, ...]:
        """Rows of both arrays, eps, and how the kernel runs."""
        rows, stream = (array.reshape(-1, array.shape[-1]) for array in (self.mixed, self.x))
        implementation = self.step.kernels.implementation("o_gate_up_down")
        return rows, stream, self.step.eps, implementation, self.step.exchange


def layer_launch(
    step: ForwardPass,
    x: Array,  # [B, T, H] the residual stream
    mixed: Addend,
    norm: Array | None,
    gate_up: AnyLinear,
    down: AnyLinear,
) -> LayerLaunch | None:
    """The launch of a layer; None where the kernel does not run."""
    if "o_gate_up_down" not in step.kernels or step.exchange is None or step.layout != WHOLE:
        return None
    if norm is None or step.centred or step.isolate_blocks or not isinstance(mixed, Product):
        return None
    weights = layer_weights(norm, mixed.linear, gate_up, down)
    if weights is None or not isinstance(mixed.x, Array):  # else its rows are rounded
        return None
    if weights.o.values.dtype == FLOAT8 and "float8_layers" not in step.kernels:
        return None
    rows, stream = (array.reshape(-1, array.shape[-1]) for array in (mixed.x, x))
    if misfit(rows, stream, weights) is not None:
        return None
    return LayerLaunch(step, x, mixed.x, weights)


def layer_weights(
    norm: Array, o: AnyLinear, gate_up: AnyLinear, down: AnyLinear
) -> LayerWeights | None:
    """The weights as the kernel reads them; None for others, and beside a bias."""
    packed: list[PackedWeights] = []
    for linear in (o, gate_up, down):
        readable = isinstance(linear, GroupedLinear | Float8Linear)
        weights = linear.packed() if readable else None
        if weights is None or linear.bias is not None:
            return None
        packed.append(weights)
    return LayerWeights(norm, *packed)
