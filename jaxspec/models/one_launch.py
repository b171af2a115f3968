"""What several blocks of a layer compute in one launch."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear, Product
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.parallel import WHOLE, Layout
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down import misfit, o_gate_up_down
from pallas_kernels.o_gate_up_down.weights import LayerWeights, PackedWeights
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class SplitSums:
    """An Addend of which partial sums are computed already: float32 [S, B, T, H]."""

    partials: Array

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        return self.partials


def layer_launch(
    step: ForwardPass,
    x: Array,  # [B, T, H] the residual stream
    mixed: Addend,
    norm: Array | None,
    gate_up: AnyLinear,
    down: AnyLinear,
) -> tuple[Array, Addend] | None:
    """The rest of a layer after its mixer, in one launch: the projection of what was mixed, the
    residual stream and its norm, and an MLP: SiLU of gate, times up, times down.

    Returns the stream before the MLP, and what the MLP adds to it; None where the kernel does not
    run.
    """
    if "o_gate_up_down" not in step.kernels or step.exchange is None or step.layout != WHOLE:
        return None
    if norm is None or step.centred or step.isolate_blocks or not isinstance(mixed, Product):
        return None
    weights = layer_weights(norm, mixed.linear, gate_up, down)
    if weights is None or not isinstance(mixed.x, Array):  # else its rows are rounded
        return None
    if (form := _form(weights)) is not None and form not in step.kernels:
        return None
    rows, stream = (array.reshape(-1, array.shape[-1]) for array in (mixed.x, x))
    if misfit(rows, stream, weights) is not None:
        return None
    how = step.eps, step.kernels.implementation("o_gate_up_down"), step.exchange
    with jax.named_scope("mlp"):
        total, partials = o_gate_up_down(rows, stream, weights, *how)
    return total.reshape(x.shape), SplitSums(partials.reshape(len(partials), *x.shape))


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


def _form(weights: LayerWeights) -> str | None:
    """The form of the kernel that takes them, as ``pallas_kernels.selection`` names it."""
    if weights.o.values.dtype != FLOAT8:
        return None
    return "float8_layers" if len(weights.o.scale) == 1 else "float8_group_layers"
