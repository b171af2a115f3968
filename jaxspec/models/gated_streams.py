"""Several residual streams that blocks read through gates of each entry, and add to
(Qwen3.8-Flash-Next).

A token has N streams of H entries, each of which is normed by itself. A block reads the mean of the
normed streams, times gates. These are sigmoids of a projection of few numbers, which are a
projection of all the streams side by side. What the block gives is added to each stream, times a
number of the token.

What follows the layers reads the streams in the same way.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config.streams import GatedStreamsConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, Linear, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, Piece, Split, Stacked, TensorMap, Tensors
from jaxspec.models.wrapped_tensors import Fused
from jaxspec.parallel.collectives import all_gather
from jaxspec.parallel.pytree import Pytree, array, pytree, static


class Additions(NamedTuple):
    """What a block does to the streams of each token.

    Attributes:
      streams: [B, T, N, H], before the block.
      written: float32 [B, T, N], what its output is multiplied by in each stream.
    """

    streams: Array
    written: Array

    @jax.named_scope("streams")
    def after(self, addend: Addend, step: ForwardPass) -> Array:
        """The streams after a block that gives what ``addend`` stands for."""
        x = self.streams
        output = step.normed(x, addend, None).astype(jnp.float32)  # [B, T, H]
        added = self.written[..., None] * output[:, :, None]
        return (x.astype(jnp.float32) + added).astype(x.dtype)


@pytree
class Gates(Pytree):
    """Weights of the gates of N streams of H entries.

    Attributes:
      norm: of each stream by itself.
      down: from all streams side by side to few numbers [N * H, rank].
      up: from these to gates [rank, N, H].
    """

    norm: Array = array("group", "hidden")  # [N, H]
    down: Linear
    up: Linear

    def __call__(self, streams: Array, step: ForwardPass) -> tuple[Array, Array]:
        """What is read of streams [B, T, N, H]: [B, T, H]; and the streams of all devices, normed,
        side by side: [B, T, N * H]."""
        axes, count = step.layout.hidden, streams.shape[2]
        normed = rms_norm(streams, self.norm, step.eps, axes)
        flat = all_gather(normed, axes).reshape(*streams.shape[:2], -1)
        low = self.down.product(flat, "streams").result(step.layout, step.kernels)
        low = jax.nn.silu(low.astype(jnp.float32) / count).astype(flat.dtype)
        gates = self.up.product(low, "streams").result(step.layout, step.kernels)
        opened = jax.nn.sigmoid(gates.astype(jnp.float32)) * normed.astype(jnp.float32)
        return jnp.mean(opened, axis=2).astype(streams.dtype), flat

    def mapped(self, module: str, tensor_map: TensorMap) -> "Gates":
        """The same, with the map's result for ``<module>.*`` in place of every array."""
        count, width = self.up.out_shape
        up = Fused(f"{module}.input_mix_weight_up", stacked(count), (width,) * count)
        return self.replace(
            norm=mapped_norm(f"{module}.hc_norm", self.norm, tensor_map),
            down=tensor_map.linear(self.down, One(f"{module}.input_mix_weight_down")),
            up=tensor_map.linear(self.up, up),
        )


@pytree
class GatedConnection(Pytree):
    """Weights of one block's connection: gates of what it reads, and a projection of all streams to
    what its output is multiplied by in each of them [N * H, N]."""

    gates: Gates
    written: Linear
    config: GatedStreamsConfig = static()

    @jax.named_scope("streams")
    def read(
        self, streams: Array, norm: Array | None, step: ForwardPass
    ) -> tuple[Additions, Array]:
        """What the block of tokens with streams [B, T, N, H] does to them, and what it reads
        [B, T, H]. ``norm`` is None: streams are normed here."""
        assert norm is None
        if step.isolate_blocks:
            streams = lax.optimization_barrier(streams)
        mixed, flat = self.gates(streams, step)
        numbers = self.written.product(flat, "streams").result(step.layout, step.kernels)
        written = 2 * jax.nn.sigmoid(numbers.astype(jnp.float32) / self.config.count)
        both = Additions(streams, written), mixed
        return lax.optimization_barrier(both) if step.isolate_blocks else both

    def mapped(self, prefix: str, block: str, tensor_map: TensorMap) -> "GatedConnection":
        """The same, with the map's result for ``<prefix><block>_hyper_connection`` in place of
        every array. ``block``: attn or ffn."""
        module = f"{prefix}{'mlp' if block == 'ffn' else block}_hyper_connection"
        written = One(f"{module}.block_inject_weight")
        return self.replace(
            gates=self.gates.mapped(module, tensor_map),
            written=tensor_map.linear(self.written, written),
        )


@pytree
class GatedFold(Pytree):
    """Weights of what is read of the streams after the last layer."""

    gates: Gates

    @jax.named_scope("streams")
    def __call__(self, streams: Array, step: ForwardPass) -> Array:
        """What is read [B, T, H] of streams [B, T, N, H]."""
        return self.gates(streams, step)[0]

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "GatedFold":
        """The same, with the map's result for ``<prefix>hyper_connection_mixer`` in place of every
        array."""
        module = f"{prefix}hyper_connection_mixer"
        return self.replace(gates=self.gates.mapped(module, tensor_map))


def stacked(count: int) -> Stacked:
    """The source of so many streams' parts of one tensor, which are those of a Fused."""
    return Stacked(tuple(map(str, range(count))))


def mapped_norm(module: str, leaf: Array, tensor_map: TensorMap) -> Array:
    """The map's result for norms [N, H] of streams, whose tensor is [N * H]."""
    source = NormOfStreams(module, leaf.shape[1], tensor_map.norm_offset)
    return tensor_map.of_source(source, "weight", leaf)


@dataclasses.dataclass(frozen=True)
class NormOfStreams:
    """The source of norms [N, H], whose tensor is [N * H].

    ``size``: H, of all devices. ``offset``: what norms have more than the tensor.
    """

    name: str
    size: int
    offset: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            stream, entry = start
            rows = ((stream + i) * self.size + entry for i in range(len(block)))
            return [
                Piece(f"{self.name}.{kind}", view, row, None, offset=self.offset)
                for view, row in zip(block, rows, strict=True)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        weight = tensors[f"{self.name}.{kind}"]
        if self.offset:
            weight = weight.astype(jnp.float32) + self.offset
        return weight.reshape(shape)


def _gates_shape(config: GatedStreamsConfig, hidden_size: int, dtype: jnp.dtype) -> Gates:
    count, rank = config.count, config.rank
    up = ("features", "group", "hidden")
    return Gates(
        norm=array_shape(count, hidden_size, dtype=dtype),
        down=linear_shape(("features", "features"), (count * hidden_size, rank), dtype),
        up=linear_shape(up, (rank, count, hidden_size), dtype),
    )


def gated_connection_shape(
    config: GatedStreamsConfig, hidden_size: int, dtype: jnp.dtype
) -> GatedConnection:
    """A GatedConnection of ShapeDtypeStructs."""
    sizes = config.count * hidden_size, config.count
    return GatedConnection(
        gates=_gates_shape(config, hidden_size, dtype),
        written=linear_shape(("features", "features"), sizes, dtype),
        config=config,
    )


def gated_fold_shape(config: GatedStreamsConfig, hidden_size: int, dtype: jnp.dtype) -> GatedFold:
    """A GatedFold of ShapeDtypeStructs."""
    return GatedFold(gates=_gates_shape(config, hidden_size, dtype))
