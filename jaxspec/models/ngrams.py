"""Embeddings of n-grams of tokens that a layer adds to its residual streams (Qwen3.8-Flash-Next).

A token and those before it are hashed to rows of a table (ngram_ids.py). The rows of all heads are
projected to a value, and to a key for each stream. A stream gets the value times a sigmoid of what
its key and the stream have in common, and a convolution of these over every n-th token before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.cache.convolution import convolution
from jaxspec.cache.ngrams import NgramState
from jaxspec.config.ngrams import NgramConfig
from jaxspec.models.attention_heads import times
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.gated_streams import mapped_norm, stacked
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.mixers.rows import RowsOfPass, after_state, check_whole_sequences
from jaxspec.models.ngram_ids import rows_of_ngrams
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import array_shape
from jaxspec.models.table_rows import local_rows
from jaxspec.models.tensors import One, Piece, Split, TensorMap, Tensors
from jaxspec.models.wrapped_tensors import Depthwise, Fused
from jaxspec.parallel import Layout, Shards
from jaxspec.parallel.collectives import all_reduce
from jaxspec.parallel.pytree import Pytree, array, pytree, static

LEAST = 1e-6  # below the square root of a product of a key and a stream


@pytree
class Ngrams(Pytree):
    """Weights of a layer's n-grams, of heads with P entries, which are E together, for N streams.

    Table rows past the model's are padding, so that devices can split them evenly.

    Attributes:
      scale: of a table of 8-bit floats, which are multiplied by it; None: they are not.
      key, value: of the rows of all heads [E, N, H] and [E, H].
      key_norm, stream_norm, input_norm: [N, H] each, of keys, of streams, and of the inputs of the
        convolution, each stream by itself.
      taps: of the convolution, the token's own last.
    """

    table: Array = array("vocab", "features")  # [V, P]
    scale: Array | None = array("features", default=None)  # float32 [1]
    key: Linear
    value: Linear
    key_norm: Array = array("group", "hidden")
    stream_norm: Array = array("group", "hidden")
    input_norm: Array = array("group", "hidden")
    taps: Array = array("length", "group", "hidden")  # [K, N, H]
    config: NgramConfig = static()

    @jax.named_scope("ngrams")
    def __call__(
        self, streams: Array, state: NgramState | None, step: ForwardPass
    ) -> tuple[Array, NgramState | None]:
        """The streams [B, T, N, H] with what they get, and the new state. Without a state the
        tokens are whole sequences, of which nothing is kept.

        Raises ValueError for devices that share sequences, and for a pass without token ids.
        """
        check_whole_sequences(step.layout)
        if step.isolate_blocks:
            streams = lax.optimization_barrier(streams)
        batch, size = streams.shape[:2]
        where, before = RowsOfPass.whole(batch, size), state
        if state is not None:
            where = RowsOfPass.of(step.attend, size)
        if before is None:
            before = self.init_state(Geometry(0, 0, batch), step.layout)
        tokens = step.ids_of_rows(batch * size).reshape(batch, size)
        rows = rows_of_ngrams(before.texts(where.rows, tokens, where.tree), self.config)
        values = self._values(streams, self._embedded(rows, step), step)
        inputs = rms_norm(values, self.input_norm, step.eps, step.layout.hidden)
        taps = before.taps(where.rows, inputs, where.tree, self.config.tokens)
        around = jax.nn.silu(convolution(taps, self.taps)).astype(streams.dtype)
        total = streams + values + around
        if step.isolate_blocks:
            total = lax.optimization_barrier(total)
        if state is None:
            return total, None
        if where.tree is not None:
            return total, state.waiting(tokens, inputs)
        return after_state((total, state.after(where.rows, where.counts, tokens, inputs)))

    def _embedded(self, rows: Array, step: ForwardPass) -> Array:
        """The rows [B, T, heads] of the table, side by side: [B, T, E]."""
        axes = step.layout.vocab
        found = local_rows(self.table, rows, axes).astype(self.value.dtype)
        found = all_reduce(found, axes).reshape(*rows.shape[:2], -1)
        return found if self.scale is None else times(found, self.scale)

    def _values(self, streams: Array, embedded: Array, step: ForwardPass) -> Array:
        """What streams [B, T, N, H] get before the convolution, of embedded n-grams [B, T, E]."""
        axes, how = step.layout.hidden, (step.layout, step.kernels)
        keys = self.key.product(embedded, "ngrams").result(*how)
        value = self.value.product(embedded, "ngrams").result(*how)
        keys = rms_norm(keys, self.key_norm, step.eps, axes).astype(jnp.float32)
        read = rms_norm(streams, self.stream_norm, step.eps, axes).astype(jnp.float32)
        hidden = self.value.out_shape[0] * (lax.axis_size(axes) if axes else 1)
        common = all_reduce(jnp.sum(keys * read, axis=-1), axes) / hidden**0.5
        gates = jnp.sqrt(jnp.maximum(jnp.abs(common), LEAST)) * jnp.sign(common)
        opened = jax.nn.sigmoid(gates)[..., None] * value.astype(jnp.float32)[:, :, None]
        return opened.astype(streams.dtype)

    def init_state(self, geometry: Geometry, layout: Layout) -> NgramState:
        """Rows without tokens. Raises ValueError for a layout that splits sequences."""
        check_whole_sequences(layout)
        _, count, hidden = self.taps.shape
        sizes = self.config.tokens - 1, self.config.past, count, hidden
        return NgramState.create(geometry, sizes, self.taps.dtype, layout)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Ngrams":
        """The same, with the map's result for ``<prefix>ple`` in place of every array."""
        module, (count, width) = f"{prefix}ple.", self.key.out_shape
        table = InParts(
            f"{module}ple_embedding.ngram_embedding", self.config.rows, self.config.parts
        )

        def of_streams(name: str) -> Fused:
            return Fused(f"{module}{name}", stacked(count), (width,) * count)

        def norm(name: str, leaf: Array) -> Array:
            return mapped_norm(f"{module}{name}", leaf, tensor_map)

        return self.replace(
            table=tensor_map.of_source(table, "weight", self.table),
            scale=tensor_map.array(f"{table.name}.weight_scale", self.scale),
            key=tensor_map.linear(self.key, of_streams("key_proj")),
            value=tensor_map.linear(self.value, One(f"{module}value_proj")),
            key_norm=norm("norm_key", self.key_norm),
            stream_norm=norm("norm_query", self.stream_norm),
            input_norm=norm("norm_conv", self.input_norm),
            taps=tensor_map.of_source(Depthwise(of_streams("conv1d")), "weight", self.taps),
        )


@dataclasses.dataclass(frozen=True)
class InParts:
    """The source of a table [V, P] whose rows are those of several tensors, one after the other.

    ``rows``: of all tensors; ours past them are padding.
    """

    name: str
    rows: int
    parts: int

    @property
    def names(self) -> tuple[str, ...]:
        size = self._size
        return tuple(f"{self.name}.shard_{i}" for i in range(-(-self.rows // size)))

    @property
    def _size(self) -> int:
        """Rows of every tensor but the last, which may have fewer."""
        return -(-self.rows // self.parts)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            first, last = start[0], min(start[0] + len(block), self.rows)
            pieces = list[Piece]()
            for index, name in enumerate(self.names):
                begin = max(first, index * self._size)
                end = min(last, (index + 1) * self._size)
                if begin < end:
                    view, row = block[begin - first : end - first], begin - index * self._size
                    pieces.append(Piece(f"{name}.{kind}", view, row, start[1]))
            return pieces

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        whole = jnp.concatenate([tensors[f"{name}.{kind}"] for name in self.names])
        return jnp.pad(whole, [(0, shape[0] - len(whole)), (0, 0)])


def ngrams_shape(
    config: NgramConfig, sizes: tuple[int, int], dtype: jnp.dtype, shards: Shards
) -> Ngrams:
    """An Ngrams of ShapeDtypeStructs, for ``sizes``: N streams of H entries."""
    count, hidden = sizes
    devices = shards.of("vocab")
    rows = -(-config.rows // devices) * devices
    norm = array_shape(count, hidden, dtype=dtype)
    key = config.embedding, count, hidden
    return Ngrams(
        table=array_shape(rows, config.width, dtype=jnp.float8_e4m3fn if config.float8 else dtype),
        scale=array_shape(1, dtype=jnp.float32, when=config.float8),
        key=linear_shape(("features", "group", "hidden"), key, dtype),
        value=linear_shape(("features", "hidden"), (config.embedding, hidden), dtype),
        key_norm=norm,
        stream_norm=norm,
        input_norm=norm,
        taps=array_shape(config.taps, count, hidden, dtype=dtype),
        config=config,
    )
