"""A layer's weights of 4 bits or 8-bit floats, as the kernels of packed_product read them."""

from typing import NamedTuple

from jax import Array


class PackedWeights(NamedTuple):
    """(values - zero) * scale, for each output and each group of inputs.

    Attributes:
      values: int4 [V, K], in the order of packed_product/order.py for rows of bfloat16; or 8-bit
        floats.
      scale, zero: [n, V]; zeros are whole numbers, or None if all are 0.
    """

    values: Array
    scale: Array
    zero: Array | None = None


class LayerWeights(NamedTuple):
    """Those behind the attention.

    Attributes:
      norm: [H], multiplies the norm of the MLP's input.
      o: [H, A]
      gate_up: [2 * F, H], all of gate, then all of up.
      down: [H, F]
    """

    norm: Array
    o: PackedWeights
    gate_up: PackedWeights
    down: PackedWeights
