"""Quantized weights in the order in which kernels read them, as soon as they are loaded."""

from typing import Any

import jax

from jaxspec.models.mlps.experts import Experts
from jaxspec.models.nodes import map_nodes
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.quantized.grouped import GroupedLinear, in_kernel_order
from jaxspec.models.quantized.packed_experts import packed_experts
from jaxspec.models.quantized.shared_among import shared_among
from jaxspec.parallel.placement import place_of
from pallas_kernels.selection import is_hopper

ORDERED = (GroupedLinear, Float8Linear, Float8Experts, FourBitExperts)


def is_ordered(node: Any) -> bool:
    """Whether ``in_order`` may change a node of weights."""
    return isinstance(node, (*ORDERED, Experts))


def in_order(node: Any) -> Any:
    """The same weights in the order of kernels, where they were; others as they are.

    Experts are put in order on a GPU that runs their kernel only, and the shared one among them.
    The scale of a Float8Linear's inputs becomes one number.
    """
    match node:
        case Experts():
            return shared_among(map_nodes(node, in_order, *ORDERED))
        case GroupedLinear():
            made = in_kernel_order(node)
            if not node.values.committed:
                return made
            values = jax.device_put(made.values, place_of(node.values), donate=True)
            return made.replace(values=values)
        case Float8Linear():
            return node.with_one_input_scale()
        case Float8Experts() | FourBitExperts():
            return packed_experts(node) if _is_for_kernel(node) else node
        case _:
            return node


def _is_for_kernel(experts: Any) -> bool:
    """Whether the device runs the kernel."""
    devices = {device for leaf in jax.tree.leaves(experts) for device in leaf.sharding.device_set}
    return len(devices) == 1 and is_hopper(*devices)
