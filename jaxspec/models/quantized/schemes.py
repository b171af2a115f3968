"""Quantization schemes by name: every Linear of a tree of weights, rounded to nearest.

For benchmarks and tests, and for drafters, whose weights do not decide the text.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.config.quantization import Scheme
from jaxspec.models.linear import AnyLinear, Linear
from jaxspec.models.mlps.expert_linear import check_no_experts
from jaxspec.models.quantized.float4 import rounded_to_float4
from jaxspec.models.quantized.float8 import rounded_to_float8
from jaxspec.models.quantized.grouped import rounded_to_groups
from jaxspec.parallel import named_shardings

GROUP, DRAFTER_GROUP = 128, 64


def _float8_blocks(linear: Linear) -> AnyLinear:
    return rounded_to_float8(linear, linear.in_size // GROUP)


# int4 and int8 with a scale for 128 inputs; e4m3 with a scale for each output, or for 128 inputs.
# Floats of 4 bits with a scale for 32 inputs (mxfp4), or for 16 and one for all (nvfp4).
# a8: inputs are rounded to e4m3, as those of weights of e4m3 are.
ROUNDINGS: Mapping[Scheme, Callable[[Linear], AnyLinear]] = MappingProxyType(
    {
        "w4a16": functools.partial(rounded_to_groups, bits=4, group=GROUP),
        "w4a16-zeros": functools.partial(rounded_to_groups, bits=4, group=GROUP, symmetric=False),
        "w4a8": functools.partial(rounded_to_groups, bits=4, group=GROUP, rounds=True),
        "w8a16": functools.partial(rounded_to_groups, bits=8, group=GROUP),
        "fp8": rounded_to_float8,
        "fp8-block": _float8_blocks,
        "mxfp4": functools.partial(rounded_to_float4, form="mxfp4"),
        "nvfp4": functools.partial(rounded_to_float4, form="nvfp4"),
    }
)


def in_scheme[T](weights: T, name: Scheme | None, *, lm_head: bool) -> T:
    """Weights, or ShapeDtypeStructs of such, with every Linear rounded; name None: as they are.

    ``lm_head``: whether the LM head is rounded, too.

    Raises ValueError for an unknown name, for a Linear whose inputs are no multiple of GROUP, and
    for weights with experts.
    """
    if name is None:
        return weights
    if name not in ROUNDINGS:
        raise ValueError(f"no quantization is called {name!r}: choose {', '.join(ROUNDINGS)}")
    check_no_experts(weights, "quantized")
    return rounded(weights, ROUNDINGS[name], lm_head=lm_head)


def in_four_bits[T](weights: T, mesh: Mesh | None) -> T:
    """Weights on a mesh with every Linear rounded to 4 bits, with a scale and a zero for groups of
    64 inputs, or as many of them as divide the inputs evenly. For drafters: without calibration
    larger groups, and groups without zeros, cost acceptance (docs/quantization.md)."""
    check_no_experts(weights, "quantized")
    rounding = functools.partial(to_four_bits, devices=1 if mesh is None else mesh.size)
    made = rounded(weights, rounding, lm_head=True)
    return made if mesh is None else jax.device_put(made, named_shardings(mesh, made))


def to_four_bits(linear: Linear, devices: int = 1) -> AnyLinear:
    """in_four_bits with inputs that may be split over so many devices."""
    group = math.gcd(linear.in_size // devices, DRAFTER_GROUP)  # no device has a part of one
    return rounded_to_groups(linear, 4, group, symmetric=False)


def rounded[T](weights: T, rounding: Callable[[Linear], AnyLinear], *, lm_head: bool) -> T:
    """``in_scheme`` by a function that rounds a Linear. Experts stay as they are."""

    def of_node(path: tuple[Any, ...], node: Any) -> Any:
        is_head = any(getattr(part, "name", None) == "lm_head" for part in path)
        if not isinstance(node, Linear) or (is_head and not lm_head):
            return node
        if isinstance(node.weight, jax.Array):
            return rounding(node)
        return jax.eval_shape(rounding, node)

    return jax.tree_util.tree_map_with_path(
        of_node, weights, is_leaf=lambda node: isinstance(node, Linear)
    )
