"""A model's layers, one at a time: their tensors, and what runs through them.

A layer is a dict of arrays, by the names that its tensors have in a checkpoint after
``model.layers.N.``; projections are [out, in]. The forward pass is that of models/layer.py, in
float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config.model import LayerConfig
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass, make_pass
from jaxspec.models.layer import Layer, layer_shape, run_layers
from jaxspec.models.linear import Linear, Product
from jaxspec.models.tensors import Source, choosing, joining
from jaxspec.parallel import WHOLE
from jaxspec.quantize.compiled import program
from pallas_kernels.selection import NO_KERNELS

FLOAT32 = jnp.dtype("float32")
Tensors = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Shared:
    """Projections of a layer that read the same input.

    Attributes:
      block: the part of the layer whose output they serve; None: a projection's output is added to
        the residual stream, so it serves only that.
      before: what gives the input, a norm or a projection: its outputs can be scaled instead.
    """

    projections: tuple[str, ...]
    block: Literal["mixer", "mlp"] | None
    before: str


# In the order in which a layer computes them.
SHARED = (
    Shared(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "mixer", "input_layernorm"
    ),
    Shared(("self_attn.o_proj",), None, "self_attn.v_proj"),
    Shared(("mlp.gate_proj", "mlp.up_proj"), "mlp", "post_attention_layernorm"),
    Shared(("mlp.down_proj",), None, "mlp.up_proj"),
)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What a layer's programs depend on, besides its tensors."""

    config: LayerConfig
    hidden_size: int
    eps: float
    norm_offset: int = 0

    def shape(self) -> Layer:
        return layer_shape(self.config, self.hidden_size, FLOAT32)

    def filled(self, tensors: Tensors) -> Layer:
        return self.shape().mapped("", joining(tensors).with_norms(self.norm_offset))

    def names(self) -> list[str]:
        """Names of the layer's projections."""
        found: list[str] = []

        def note(linear: Any, source: Source) -> Any:
            found.extend(source.names)
            return linear

        self.shape().mapped("", choosing(note))
        return found

    def check(self) -> None:
        """Raise ValueError for a layer with projections that SHARED does not have, or without the
        norms that it says stand before them."""
        if self.norm_offset or self.config.norms != "before" or self.config.centred:
            raise ValueError(
                "no method is written for layers with norms other than before mixer and MLP, or "
                "that multiply by 1 + w or subtract the mean"
            )
        known = {name for shared in SHARED for name in shared.projections}
        if unknown := [name for name in self.names() if name not in known]:
            raise ValueError(f"{', '.join(unknown)}: no method is written for such projections")


class Batch(NamedTuple):
    """Hidden states before a layer, and which tokens are not padding."""

    states: np.ndarray  # float32 [B, T, H], on the host
    valid: np.ndarray  # bool [B, T]


@dataclasses.dataclass(frozen=True)
class Observed:
    """In place of a Linear: notes its input."""

    linear: Linear
    note: Callable[[Array], None]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.linear.out_shape

    def product(self, x: Array, scope: str) -> Product:
        self.note(x)
        return self.linear.product(x, scope)


def forward_pass(kind: LayerKind, shape: tuple[int, ...]) -> ForwardPass:
    """A pass over whole sequences [B, T], without a cache."""
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape[:2])
    return make_pass((kind.config,), positions, dense_causal_attend, kind.eps, WHOLE, NO_KERNELS)


def run_layer(layer: Layer, kind: LayerKind, states: Array) -> Array:
    """The residual stream [B, T, H] after a layer, from that before it."""
    step = forward_pass(kind, states.shape)
    first = step.norm(states, layer.input_norm)
    [after], _, _ = run_layers((layer,), states, first, (None,), step, None)
    return after


@functools.partial(program, static_argnames=("kind",))
def layer_output(tensors: Tensors, states: Array, kind: LayerKind) -> Array:
    return run_layer(kind.filled(tensors), kind, states)


def inputs_of(
    tensors: Tensors, states: Array, kind: LayerKind, groups: Sequence[Shared]
) -> list[Array]:
    """What the projections of each group read, [B, T, in], from one pass through the layer. In a
    program nothing that comes after them is computed."""
    noted: dict[tuple[str, ...], Array] = {}

    def observe(linear: Any, source: Source) -> Any:
        return Observed(linear, functools.partial(noted.__setitem__, tuple(source.names)))

    layer = kind.filled(tensors).mapped("", choosing(observe))
    run_layer(layer, kind, states)
    return [noted[shared.projections] for shared in groups]


def block_output(tensors: Tensors, normed: Array, kind: LayerKind, shared: Shared) -> Array:
    """What the block of some projections adds to the residual stream, [B, T, H], from their
    input."""
    layer, step = kind.filled(tensors), forward_pass(kind, normed.shape)
    assert layer.mixer is not None and layer.mlp is not None, "other layers are not quantized"
    if shared.block == "mixer":
        added, _ = layer.mixer(normed, None, step)
    else:
        added = layer.mlp(normed, step)
    return step.add_norm(jnp.zeros_like(normed), added, None)[0]


class InputStatistics(NamedTuple):
    """What is known of the inputs x of a projection, sums over tokens.

    Attributes:
      hessian: float32 [in, in], of x xᵀ.
      magnitude: float32 [in], of |x|.
      count: float32 [], tokens.
    """

    hessian: Array
    magnitude: Array
    count: Array


def statistics_of(inputs: Array, valid: Array) -> InputStatistics:
    """Sums over inputs [B, T, in]; those that are not ``valid`` [B, T] do not count."""
    kept = jnp.where(valid[..., None], inputs, 0.0).reshape(-1, inputs.shape[-1])
    hessian = jnp.matmul(kept.T, kept, precision="highest")
    return InputStatistics(hessian, jnp.abs(kept).sum(0), valid.sum().astype(jnp.float32))


@functools.partial(program, static_argnames=("sizes",))
def nothing_seen(sizes: tuple[int, ...]) -> tuple[InputStatistics, ...]:
    """Statistics of no tokens, for inputs of each of some sizes."""
    return tuple(
        InputStatistics(jnp.zeros((size, size)), jnp.zeros(size), jnp.zeros(())) for size in sizes
    )


def added(total: InputStatistics, inputs: Array, valid: Array) -> InputStatistics:
    return jax.tree.map(jnp.add, total, statistics_of(inputs, valid))


@functools.partial(program, static_argnames=("kind", "groups"), donate_argnames=("total",))
def _add_batch(
    total: tuple[InputStatistics, ...],
    tensors: Tensors,
    states: Array,
    valid: Array,
    kind: LayerKind,
    groups: tuple[Shared, ...],
) -> tuple[InputStatistics, ...]:
    inputs = inputs_of(tensors, states, kind, groups)
    return tuple(added(sums, x, valid) for sums, x in zip(total, inputs, strict=True))


def observe(
    tensors: Tensors, batches: Sequence[Batch], kind: LayerKind, groups: tuple[Shared, ...]
) -> tuple[InputStatistics, ...]:
    """Statistics of the inputs of each group of projections, over all batches, which pass the layer
    once."""
    firsts = [shared.projections[0] for shared in groups]
    total = nothing_seen(tuple(tensors[f"{name}.weight"].shape[1] for name in firsts))
    for batch in batches:
        total = _add_batch(total, tensors, batch.states, batch.valid, kind, groups)
    return total


def advance(tensors: Tensors, batches: Sequence[Batch], kind: LayerKind) -> list[Batch]:
    """The batches after a layer."""
    after = on_host(layer_output(tensors, batch.states, kind) for batch in batches)
    return [batch._replace(states=states) for batch, states in zip(batches, after, strict=True)]


def on_host(results: Iterable[Array]) -> Iterator[np.ndarray]:
    """Results of programs. Each is copied while the next is computed; the device holds two."""
    before: Array | None = None
    for result in results:
        result.copy_to_host_async()
        if before is not None:
            yield np.asarray(before)
        before = result
    if before is not None:
        yield np.asarray(before)


def embedded(table: np.ndarray, tokens: np.ndarray, valid: np.ndarray, size: int) -> list[Batch]:
    """Batches of at most ``size`` rows: embeddings of tokens [N, T] from a table [V, H]."""
    starts = range(0, len(tokens), size)
    rows = [slice(start, start + size) for start in starts]
    return [Batch(table[tokens[each]].astype(np.float32), valid[each]) for each in rows]
