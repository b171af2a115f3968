"""What a round is expected to cost before any has run: by its bytes and operations."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.draft_bytes import draft_weight_bytes
from jaxspec.decoding.drafters import Drafter
from jaxspec.models.decoder import Decoder
from jaxspec.models.layer import Layer
from jaxspec.models.mlps import Experts
from jaxspec.parallel.bytes import local_bytes


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a kind of device is. Choices depend on the ratios alone.

    Attributes:
      bandwidth: bytes of weights a second.
      operations: additions and multiplications a second.
      layer: seconds of a layer besides these.
      draft_step: the same of a draft step.
      several: how much longer reading the weights takes for several tokens than for one.
      overlap: 1 where reading and computing take their sum; the larger, the nearer to the longer of
        the two.
    """

    bandwidth: float
    operations: float
    layer: float
    draft_step: float
    several: float = 1.0
    overlap: float = 1.0


# The CPU's: two cores of an AMD EPYC, from rounds of the built-in pair (docs/results/cpu.md); XLA
# copies weights to tiles. The others': an H100, from rounds of the 8B shape (README.md): what
# chains of 3 and 5 cost more than plain decoding is right within a tenth up to 32 rows.
CPU = Speed(bandwidth=40e9, operations=110e9, layer=30e-6, draft_step=30e-6, several=1.6)
ACCELERATOR = Speed(3e12, 585e12, layer=20e-6, draft_step=60e-6, overlap=2.0)


class PriorCosts:
    """Seconds of a round by shape and rows, as its bytes and operations suggest.

    A pass reads its weights once, and computes for each of its tokens. What attention, sampling
    and the host take is left out: it is learnt from the calls that serve.
    """

    call = 0.0

    def __init__(self, target: Decoder, drafter: Drafter):
        platform = next(iter(target.embed.devices())).platform
        self.speed = CPU if platform == "cpu" else ACCELERATOR
        lm_head = local_bytes(target.embed if target.lm_head is None else target.lm_head)
        shapes = jax.tree.map(_shape, drafter)  # weights that are replaced must not stay in memory
        self.draft_bytes = functools.cache(
            lambda depth: draft_weight_bytes(shapes, depth, lm_head)
        )  # as every call of an engine asks for its costs
        table = 0 if target.lm_head is None else local_bytes(target.embed)
        self.layers = len(target.layers)
        self.target_bytes = local_bytes(target) - table
        self.target_work = 2 * (_elements(target) - _idle_elements(target.layers))
        if target.lm_head is not None:
            self.target_work -= 2 * _elements(target.embed)
        self.element = jnp.dtype(target.dtype).itemsize

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round of so many rows on each device."""
        verify = self._pass(self.target_bytes, self.target_work, rows * shape.num_nodes)
        verify += self.layers * self.speed.layer
        if shape.is_plain:
            return verify
        read = self.draft_bytes(shape.max_depth)
        work = 2 * read / self.element  # each step computes with what it reads
        steps = shape.max_depth * self.speed.draft_step
        return verify + self._pass(read, work, rows * shape.top_k) + steps

    def _pass(self, read: float, work: float, tokens: int) -> float:
        speed = self.speed
        slower = speed.several if tokens > 1 else 1.0
        times = slower * read / speed.bandwidth, work * tokens / speed.operations
        return sum(time**speed.overlap for time in times) ** (1 / speed.overlap)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _elements(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _idle_elements(layers: Iterable[Layer]) -> int:
    """Weights of the experts that a token does not choose."""
    idle = 0.0
    for layer in layers:
        if isinstance(layer.mlp, Experts):
            routing = layer.mlp.config.routing
            share = 1 - routing.top_k / routing.num_experts
            idle += share * _elements((layer.mlp.gate_up, layer.mlp.down))
    return round(idle)
