"""Quantized weights in the order in which kernels read them, as soon as they are loaded."""

from typing import Any

import jax

from jaxspec.models.mlps.experts import Experts
from jaxspec.models.nodes import map_nodes
from jaxspec.models.quantized.float4 import Float4Linear, in_float4_order
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.quantized.grouped import GroupedLinear, in_kernel_order
from jaxspec.models.quantized.packed_experts import packed_experts
from jaxspec.models.quantized.shared_among import shared_among
from jaxspec.parallel.placement import place_of
from pallas_kernels.selection import Kernels, is_hopper

ORDERED = (GroupedLinear, Float4Linear, Float8Linear, Float8Experts, FourBitExperts)


def is_ordered(node: Any) -> bool:
    """Whether ``in_order`` may change a node of weights."""
    return isinstance(node, (*ORDERED, Experts))


def in_order(node: Any) -> Any:
    """The same weights in the order of kernels, where they were; others as they are.

    Floats of 4 bits are put in order where ``--kernels auto`` runs their kernel only: others undo
    the order in each pass. So are experts, on a single GPU, and the shared one among them.
    The scale of a Float8Linear's inputs becomes one number.
    """
    match node:
        case Experts():
            return shared_among(map_nodes(node, in_order, *ORDERED))
        case GroupedLinear():
            made = in_kernel_order(node)
            return _where_it_lay(made, node)
        case Float4Linear():
            return _where_it_lay(in_float4_order(node), node) if _has_float4_kernel(node) else node
        case Float8Linear():
            return node.with_one_input_scale()
        case Float8Experts() | FourBitExperts():
            return packed_experts(node) if _is_for_kernel(node) else node
        case _:
            return node


def _where_it_lay[T: GroupedLinear | Float4Linear](made: T, node: T) -> T:
    """The arrays that were put in order on the devices of those before."""
    if not node.values.committed:
        return made
    names = ("values", "scale")
    moved = {
        name: jax.device_put(getattr(made, name), place_of(getattr(node, name)), donate=True)
        for name in names
        if getattr(made, name) is not getattr(node, name)
    }
    return made.replace(**moved)


def _has_float4_kernel(linear: Float4Linear) -> bool:
    """Whether its devices run the kernel of its products by default."""
    devices = _devices_of(linear)
    return "packed_float_product" in Kernels.for_device(next(iter(devices)), len(devices))


def _is_for_kernel(experts: Any) -> bool:
    """Whether the device runs the kernel."""
    devices = _devices_of(experts)
    return len(devices) == 1 and is_hopper(*devices)


def _devices_of(weights: Any) -> set[Any]:
    return {device for leaf in jax.tree.leaves(weights) for device in leaf.sharding.device_set}
