"""Several residual streams (manifold-constrained hyper-connections, arXiv 2512.24880; the streams
of arXiv 2409.19606).

A token has N streams of H entries. A block reads a weighted sum of them. Each stream after it is a
weighted sum of the streams before it, plus a multiple of what the block gives. All these weights
are numbers of the token: a projection of all its streams, normed together. The matrix of the sums
is made doubly stochastic, so that streams do not grow from layer to layer.

What follows the layers gets the mean of the streams, or a weighted sum. A head that reads hidden
states gets the mean.

Streams that are read through gates of each entry are of gated_streams.py.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config.streams import AnyStreamsConfig, GatedStreamsConfig, StreamsConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.gated_streams import (
    GatedConnection,
    GatedFold,
    gated_connection_shape,
    gated_fold_shape,
)
from jaxspec.models.linear import Addend
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import Piece, Split, TensorMap, Tensors
from jaxspec.parallel import Axes
from jaxspec.parallel.collectives import all_reduce
from jaxspec.parallel.pytree import Pytree, array, pytree, static


def spread(x: Array, count: int) -> Array:
    """So many streams [B, T, N, H] of a residual stream [B, T, H]; streams stay as they are."""
    if x.ndim == 4:
        return x
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], count, x.shape[-1]))


def joined(streams: Array) -> Array:
    """The mean [B, T, H] of streams [B, T, N, H]."""
    return jnp.mean(streams.astype(jnp.float32), axis=2).astype(streams.dtype)


def joined_norm(streams: Array, norm: "Array | FoldedNorm | None", step: ForwardPass) -> Array:
    """One stream of streams [B, T, N, H] after the last layer, normed: [B, T, H]."""
    if step.isolate_blocks:
        streams = lax.optimization_barrier(streams)
    if isinstance(norm, FoldedNorm):
        normed = step.norm(norm.fold(streams, step), norm.norm)
    else:
        normed = step.norm(joined(streams), norm)
    return lax.optimization_barrier(normed) if step.isolate_blocks else normed


class Connection(NamedTuple):
    """How a block is connected to the streams of each token.

    Attributes:
      streams: [B, T, N, H], before the block.
      read: float32 [B, T, N], the streams' weights in what the block reads.
      written: float32 [B, T, N], what its output is multiplied by in each stream.
      kept: float32 [B, T, N, N], of a stream before the block (first) in a stream after it (last);
        None: each stays as it is.
    """

    streams: Array
    read: Array
    written: Array
    kept: Array | None

    @property
    def input(self) -> Array:
        """What the block reads, not normed: [B, T, H]."""
        x = self.streams
        return jnp.sum(self.read[..., None] * x, axis=2).astype(x.dtype)

    @jax.named_scope("streams")
    def after(self, addend: Addend, step: ForwardPass) -> Array:
        """The streams after a block that gives what ``addend`` stands for."""
        x, precision = self.streams, lax.Precision.HIGHEST
        output = step.normed(x, addend, None)  # [B, T, H]
        kept = x.astype(jnp.float32)
        if self.kept is not None:
            kept = jnp.einsum("btmn,btmh->btnh", self.kept, kept, precision=precision)
        written = self.written[..., None] * output.astype(jnp.float32)[:, :, None]
        return (kept + written).astype(x.dtype)


@pytree
class HyperConnection(Pytree):
    """Weights of one block's connection: of M = (2 + N) * N numbers, which are those of ``read``,
    of ``written`` and of ``kept``; or of 2 * N, if streams are not mixed. All float32.

    ``weight``: projects streams; ``scale`` and ``base``: the kinds are multiplied, all added.
    """

    weight: Array = array("group", "hidden", "features")  # [N, H, M]
    scale: Array = array("features")  # [3], or [2]
    base: Array = array("features")  # [M]
    config: StreamsConfig = static()

    def read(
        self, streams: Array, norm: Array | None, step: ForwardPass
    ) -> tuple[Connection, Array]:
        """The connection of tokens with streams [B, T, N, H], and what the block reads, normed."""
        if step.isolate_blocks:
            streams = lax.optimization_barrier(streams)
        connection = self(streams, step.eps, step.layout.hidden)
        both = connection, step.norm(connection.input, norm)
        return lax.optimization_barrier(both) if step.isolate_blocks else both

    @jax.named_scope("streams")
    def __call__(self, streams: Array, eps: float, axes: Axes) -> Connection:
        """The connection of tokens with streams [B, T, N, H]. ``eps``: of the norm before the
        projection; ``axes``: mesh axes that H is split over."""
        config, numbers = self.config, projected(streams, self.weight, eps, axes)
        count = config.count
        kinds = np.repeat(np.arange(len(config.kinds)), config.kinds)
        numbers = numbers * self.scale[kinds] + self.base
        read, written, kept = jnp.split(numbers, [count, 2 * count], axis=-1)
        read, written = jax.nn.sigmoid(read) + config.eps, jax.nn.sigmoid(written)
        if config.magnitude is not None:
            return Connection(streams, read, config.magnitude * written + config.eps, None)
        kept = doubly_stochastic(kept.reshape(*kept.shape[:2], count, count), config)
        return Connection(streams, read, 2 * written, kept)

    def mapped(self, prefix: str, block: str, tensor_map: TensorMap) -> "HyperConnection":
        """The same, with the map's result for ``<prefix>hc_<block>_*`` in place of every array."""
        module, size = prefix.removesuffix("."), self.weight.shape[1]
        name = f"hc_{block}_"
        return self.replace(
            weight=tensor_map.of_source(OfStreams(module, size), f"{name}fn", self.weight),
            scale=tensor_map.array(f"{prefix}{name}scale", self.scale),
            base=tensor_map.array(f"{prefix}{name}base", self.base),
        )


def projected(streams: Array, weight: Array, eps: float, axes: Axes) -> Array:
    """Numbers float32 [B, T, M] of streams [B, T, N, H], normed together and projected by a weight
    [N, H, M]. ``axes``: mesh axes that H is split over."""
    wide = streams.astype(jnp.float32)
    product = jnp.einsum("btnh,nhm->btm", wide, weight, precision=lax.Precision.HIGHEST)
    squares = jnp.mean(wide * wide, axis=(2, 3))[..., None]
    if axes:  # all devices have as many entries
        squares = lax.pmean(squares, axes)
    return all_reduce(product, axes) * lax.rsqrt(squares + eps)


@pytree
class Fold(Pytree):
    """Weights of what makes one stream of N after the last layer. All float32.

    ``weight``: projects streams to a number of each; ``scale`` and ``base``: multiplied and added.
    """

    weight: Array = array("group", "hidden", "features")  # [N, H, N]
    scale: Array = array("features")  # [1]
    base: Array = array("features")  # [N]
    eps: float = static()

    @jax.named_scope("streams")
    def __call__(self, streams: Array, step: ForwardPass) -> Array:
        """The sum [B, T, H] of streams [B, T, N, H]."""
        numbers = projected(streams, self.weight, step.eps, step.layout.hidden)
        weights = jax.nn.sigmoid(numbers * self.scale + self.base) + self.eps
        return jnp.sum(weights[..., None] * streams, axis=2).astype(streams.dtype)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Fold":
        """The same, with the map's result for ``<prefix>hc_head_*`` in place of every array."""
        source = OfStreams(prefix.removesuffix("."), self.weight.shape[1])
        return self.replace(
            weight=tensor_map.of_source(source, "hc_head_fn", self.weight),
            scale=tensor_map.array(f"{prefix}hc_head_scale", self.scale),
            base=tensor_map.array(f"{prefix}hc_head_base", self.base),
        )


AnyFold = Fold | GatedFold


class FoldedNorm(NamedTuple):
    """What stands for the last norm of a model whose streams are folded before it; None: they are
    normed when they are folded."""

    fold: AnyFold
    norm: Array | None


@pytree
class Streams(Pytree):
    """Connections of a layer's two blocks."""

    mixer: HyperConnection | GatedConnection
    mlp: HyperConnection | GatedConnection

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self.mixer.config.count

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Streams":
        """The same, with the map's result for layer ``prefix`` in place of every array."""
        return self.replace(
            mixer=self.mixer.mapped(prefix, "attn", tensor_map),
            mlp=self.mlp.mapped(prefix, "ffn", tensor_map),
        )


def doubly_stochastic(scores: Array, config: StreamsConfig) -> Array:
    """Matrices [..., N, N] of a softmax of each row, whose columns and rows are then divided by
    their sums in turn, columns first and last."""

    def divided(matrix: Array, axis: int) -> Array:
        # Written out, a sum of few entries is fused with what reads it, and a reduction is not.
        total = functools.reduce(jnp.add, jnp.split(matrix, config.count, axis))
        return matrix / (total + config.eps)

    def step(_: Array, matrix: Array) -> Array:
        return divided(divided(matrix, -1), -2)

    first = divided(jax.nn.softmax(scores, axis=-1) + config.eps, -2)
    return lax.fori_loop(0, config.iterations - 1, step, first)


@dataclasses.dataclass(frozen=True)
class OfStreams:
    """The source of a projection of streams [N, H, M], whose tensor is [M, N * H].

    ``size``: H, of all devices.
    """

    name: str
    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            stream, entry, row = start
            return [
                Piece(f"{self.name}.{kind}", view.T, row, (stream + i) * self.size + entry)
                for i, view in enumerate(block)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return tensors[f"{self.name}.{kind}"].T.reshape(shape)


def fold_shape(
    config: AnyStreamsConfig | None, hidden_size: int, dtype: jnp.dtype
) -> AnyFold | None:
    """What folds streams after the last layer, of ShapeDtypeStructs; None: nothing does."""
    if isinstance(config, GatedStreamsConfig):
        return gated_fold_shape(config, hidden_size, dtype)
    if config is None or not config.folded:
        return None
    count = config.count
    return Fold(
        weight=array_shape(count, hidden_size, count, dtype=jnp.float32),
        scale=vector(1, jnp.float32),
        base=vector(count, jnp.float32),
        eps=config.eps,
    )


def streams_shape(config: AnyStreamsConfig, hidden_size: int, dtype: jnp.dtype) -> Streams:
    """Streams of ShapeDtypeStructs."""
    if isinstance(config, GatedStreamsConfig):
        gated = gated_connection_shape(config, hidden_size, dtype)
        return Streams(mixer=gated, mlp=gated)
    count, numbers = config.count, sum(config.kinds)

    def connection() -> HyperConnection:
        return HyperConnection(
            weight=array_shape(count, hidden_size, numbers, dtype=jnp.float32),
            scale=vector(len(config.kinds), jnp.float32),
            base=vector(numbers, jnp.float32),
            config=config,
        )

    return Streams(mixer=connection(), mlp=connection())
