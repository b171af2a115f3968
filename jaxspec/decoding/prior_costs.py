"""What a round is expected to cost before any has run: by its bytes and operations."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.draft_bytes import draft_weight_bytes
from jaxspec.decoding.drafters import Drafter
from jaxspec.decoding.trees.worth_verifying import NodeCosts
from jaxspec.models.decoder import Decoder
from jaxspec.models.layer import Layer
from jaxspec.models.mlps import Experts
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from jaxspec.parallel.bytes import local_bytes

LOGIT_BYTES = 4  # float32


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
      full_width: hidden size from which products reach ``operations``; narrower models reach the
        square root of their share.
      logit_passes: how often the logits of a token are read or written.
      float32: share of ``operations`` that products of float32 numbers reach.
    """

    bandwidth: float
    operations: float
    layer: float
    draft_step: float
    several: float = 1.0
    overlap: float = 1.0
    full_width: int = 1
    logit_passes: int = 0
    float32: float = 1.0


# The CPU's: two cores of an AMD EPYC, from rounds of the built-in pair (docs/results/cpu.md); XLA
# copies weights to tiles. The others': an H100, from rounds of the 8B shape (README.md), and an
# H200, from those of SmolLM2-135M (docs/results/real_models.md, and in float32 rl.md). What chains
# cost more than plain decoding is right within an eighth for both up to 32 rows.
CPU = Speed(bandwidth=40e9, operations=110e9, layer=30e-6, draft_step=30e-6, several=1.6)
ACCELERATOR = Speed(
    bandwidth=3.2e12,
    operations=585e12,
    layer=30e-6,
    draft_step=45e-6,
    overlap=2.0,
    full_width=4096,
    logit_passes=4,
    float32=1 / 4,
)


@dataclasses.dataclass(frozen=True)
class RoundWork:
    """What the rounds of a model and its drafter read and compute, on each device.

    Attributes:
      weights: bytes of the target that a pass reads, all experts included.
      operations: additions and multiplications of the target for a token.
      layers: of the target.
      width: its hidden size.
      vocab: its logits of a token.
      element: bytes of one of its numbers.
      draft_bytes: bytes that so many draft steps read.
      experts: bytes of the target's experts that tokens choose among.
      chosen: share of these that a token chooses.
    """

    weights: int
    operations: int
    layers: int
    width: int
    vocab: int
    element: int
    draft_bytes: Callable[[int], int]
    experts: int = 0
    chosen: float = 1.0

    def read(self, tokens: float) -> float:
        """Bytes of the target that a pass over so many tokens reads, if they choose all experts
        alike often and independently of each other."""
        return self.weights - self.experts * (1 - self.chosen) ** tokens


class PriorCosts:
    """Seconds of a round by shape and rows, as its bytes and operations suggest.

    A pass reads its weights once, and computes for each of its tokens. What attention, sampling
    and the host take is left out: it is learnt from the calls that serve.
    """

    call = 0.0

    def __init__(self, work: RoundWork, speed: Speed):
        self.work, self.speed = work, speed
        share = math.sqrt(min(1.0, work.width / speed.full_width))
        if work.element == 4:
            share *= speed.float32
        self._operations = speed.operations * share  # that the model reaches a second

    def seconds(self, rows: int, shape: TreeShape, drafted: float | None = None) -> float:
        """Seconds of a round of so many rows on each device.

        ``drafted``: tokens of a tree that are verified on average; None: all. The others are
        computed, too, as the program has one width, but choose no experts.
        """
        work, speed, tokens = self.work, self.speed, rows * shape.num_nodes
        read = work.read(tokens if drafted is None else rows * (1 + drafted))
        verify = self._pass(read, work.operations, tokens) + work.layers * speed.layer
        verify += tokens * work.vocab * LOGIT_BYTES * speed.logit_passes / speed.bandwidth
        if shape.is_plain:
            return verify
        draft = work.draft_bytes(shape.max_depth)
        computed = 2 * draft / work.element  # each step computes with what it reads
        steps = shape.max_depth * speed.draft_step
        return verify + self._pass(draft, computed, rows * shape.top_k) + steps

    def tokens_as_long_as(self, seconds: float) -> int:
        """Tokens for which the target computes as long as it reads its weights, and ``seconds``
        more."""
        reading = self.work.weights / self.speed.bandwidth
        return round((seconds + reading) * self._operations / self.work.operations)

    def node_costs(self, depth: int) -> NodeCosts | None:
        """What verified tokens cost in rounds that draft so many, by the experts that they choose;
        None: there are none to choose among."""
        work, speed = self.work, self.speed
        if not work.experts:
            return None
        read = work.weights - work.experts + work.draft_bytes(depth)
        return NodeCosts(
            fixed=read / speed.bandwidth + work.layers * speed.layer + depth * speed.draft_step,
            experts=work.experts / speed.bandwidth,
            chosen=work.chosen,
        )

    def _pass(self, read: float, operations: float, tokens: int) -> float:
        speed = self.speed
        slower = speed.several if tokens > 1 else 1.0
        times = slower * read / speed.bandwidth, operations * tokens / self._operations
        return sum(time**speed.overlap for time in times) ** (1 / speed.overlap)


def prior_costs(target: Decoder, drafter: Drafter) -> PriorCosts:
    """The costs of these two on the kind of device that they lie on."""
    platform = next(iter(target.embed.devices())).platform
    return PriorCosts(round_work(target, drafter), CPU if platform == "cpu" else ACCELERATOR)


def round_work(target: Decoder, drafter: Drafter) -> RoundWork:
    """What their weights say."""
    lm_head = local_bytes(target.embed if target.lm_head is None else target.lm_head)
    shapes = jax.tree.map(_shape, drafter)  # weights that are replaced must not stay in memory
    tables = [] if target.lm_head is None else [target.embed]  # of which rows are gathered
    if target.tokens is not None:
        tables.append(target.tokens.embed)
    operations = 2 * (_elements(target) - _idle_elements(target.layers) - _elements(tables))
    layers = nodes_of(target.layers, Experts)
    sizes = [local_bytes((experts.gate_up, experts.down)) for experts in layers]
    shares = [experts.share_read(experts.config.routing.top_k) for experts in layers]
    chosen = sum(size * share for size, share in zip(sizes, shares, strict=True))
    return RoundWork(
        weights=local_bytes(target) - local_bytes(tables),
        operations=operations,
        layers=len(target.layers),
        width=target.config.hidden_size,
        vocab=target.embed.sharding.shard_shape(target.embed.shape)[0],
        element=jnp.dtype(target.dtype).itemsize,
        # Every call of an engine asks for its costs.
        draft_bytes=functools.cache(lambda depth: draft_weight_bytes(shapes, depth, lm_head)),
        experts=sum(sizes),
        chosen=chosen / sum(sizes) if sizes else 1.0,
    )


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _elements(tree: Any) -> int:
    """Weights of a device. Bytes of two count twice."""
    pairs = [node.pairs for node in nodes_of(tree, FourBitExperts)]
    pairs += [node.values for node in nodes_of(tree, PackedExpertLinear) if node.code != "e4m3"]
    pairs += [node.values for node in nodes_of(tree, Float4Linear)]
    leaves = (*jax.tree.leaves(tree), *pairs)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def _idle_elements(layers: Iterable[Layer]) -> int:
    """Weights of the experts that a token does not choose."""
    idle = 0.0
    for experts in nodes_of(layers, Experts):
        share = 1 - experts.share_read(experts.config.routing.top_k)
        idle += share * _elements((experts.gate_up, experts.down))
    return round(idle)
