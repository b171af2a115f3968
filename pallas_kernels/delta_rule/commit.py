"""The commit of accepted paths on Hopper GPUs: a thread block per row, key head and layer, with a
warpgroup for each 64 columns of its states.

A layer alone took 3.4 us on an H200 for a few kilobytes: mostly a launch's begin and end, and loads
that waited for the stores before them. So a launch commits several layers, and what is moved is
loaded before any of it is stored.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.delta_rule.tiles import (
    BY_COLUMN,
    COLUMNS,
    TILE,
    applied,
    load,
    load_token,
    part_of,
)
from pallas_kernels.delta_rule.tokens import LayerRows, Tokens
from pallas_kernels.mosaic_module_names import fixed_name

LAYERS = 6  # of a launch, at most: each has its own machine code in the kernel
THREADS = 128  # of a warpgroup

Kept = tuple[Array, Tokens, Array]  # s, window and channels of a layer


def delta_commit_mosaic(
    layers: Sequence[LayerRows],
    rows: Array,  # [B]
    held: Array,  # [B]
    path: Array,  # [B, A]
    counts: Array,  # [B]
    *,
    interpret: Any = None,
) -> list[Kept]:
    """See pallas_kernels.delta_rule.delta_commit; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    kept = []
    for some in launches_of(layers):
        kept += _commit_some(some, rows, held, path, counts, interpret)
    return kept


def launches_of(layers: Sequence[LayerRows]) -> Iterator[tuple[LayerRows, ...]]:
    """Neighbours, divided evenly."""
    launches = -(-len(layers) // LAYERS)
    bounds = [len(layers) * index // launches for index in range(launches + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield tuple(layers[begin:end])


# Traced once for all launches with the same number of layers.
@functools.partial(jax.jit, static_argnames=("interpret",))
def _commit_some(
    layers: tuple[LayerRows, ...],
    rows: Array,
    held: Array,
    path: Array,
    counts: Array,
    interpret: Any,
) -> list[Kept]:
    first, past = layers[0], layers[0].channels.shape[1]
    num_rows, groups, values, v_dim, _ = first.s.shape
    parts, capacity = values * v_dim // COLUMNS, first.window.k.shape[1]
    kept = [(layer.s, layer.window, layer.channels) for layer in layers]
    added = [(layer.nodes, layer.node_channels) for layer in layers]
    leaves, structure = jax.tree.flatten((added, kept))
    num_added = len(jax.tree.leaves(added))

    @fixed_name(interpret)
    def delta_commit_kernel(rows_ref, held_ref, path_ref, counts_ref, *refs):
        *given, folded = refs
        added, kept = jax.tree.unflatten(structure, given)
        sequence, group, part = (kernel_axes.index(name) for name in ("sequence", "group", "part"))
        count, begin = counts_ref[sequence], held_ref[sequence]
        row = _Row(
            sequence=sequence,
            index=jnp.minimum(rows_ref[sequence], num_rows - 1),
            count=count,
            held=begin,
            folds=jnp.maximum((begin + count) // capacity * capacity - begin, 0),
            part=(group, *part_of(part, values)),
            path_ref=path_ref,
        )
        for index, ((nodes, channels), (s, window, last)) in enumerate(
            zip(added, kept, strict=True)
        ):

            @pl.when(kernel_axes.index("layer") == index)
            def _layer(nodes=nodes, channels=channels, s=s, window=window, last=last):
                row.fold(s, window, nodes)
                # The window's first tokens are overwritten once every part has applied them.
                plgpu.barrier_arrive(folded)
                plgpu.barrier_wait(folded)
                row.append(window, nodes, part, values)
                is_last = (part == parts - 1) & (count > 0)
                pl.when(is_last)(functools.partial(row.move_channels, last, channels, past))

    kernel = plgpu.kernel(
        delta_commit_kernel,
        out_type=(),
        scratch_types=[plgpu.Barrier(num_arrivals=parts)],
        grid=(groups, len(rows), len(layers)),
        grid_names=kernel_axes.names("group", "sequence", "layer"),
        num_threads=parts,
        thread_name=kernel_axes.name("part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    refs = [jax.new_ref(array) for array in leaves[num_added:]]
    kernel(rows, held, path, counts, *leaves[:num_added], *refs)
    return jax.tree.unflatten(jax.tree.structure(kept), [jax.freeze(ref) for ref in refs])


@dataclasses.dataclass(frozen=True)
class _Row:
    """What a warpgroup commits of a row.

    Attributes:
      index: of the row in states and windows.
      count: accepted nodes, ``path_ref[sequence, :count]``.
      held: tokens in the window.
      folds: how many of the nodes the state is folded up to; 0 if the window is not full.
      part: group, value head and columns.
    """

    sequence: Any
    index: Any
    count: Any
    held: Any
    folds: Any
    part: tuple[Any, Any, Any]
    path_ref: Any

    def fold(self, s_ref: Any, window: Tokens, nodes: Tokens) -> None:
        """Apply tokens to the state, up to the last multiple of the window's size."""

        def old(place: Any, tile: Array) -> Array:
            return applied(tile, load_token(window, self.index, place, self.part))

        def new(place: Any, tile: Array) -> Array:
            node = self.path_ref[self.sequence, place]
            return applied(tile, load_token(nodes, self.sequence, node, self.part))

        @pl.when(self.folds > 0)
        def _fold():
            tile = load(s_ref.at[self.index, *self.part], TILE)
            tile = lax.fori_loop(0, self.held, old, tile)
            s_ref[self.index, *self.part] = lax.fori_loop(0, self.folds, new, tile)

    def append(self, window: Tokens, nodes: Tokens, part: Any, values: int) -> None:
        """Write the nodes to the window: of a group the first warpgroup its key, the first of each
        value head its strengths."""
        capacity, k_dim = window.k.shape[1], window.k.shape[-1]
        of_key = plgpu.Layout.WG_STRIDED((k_dim,), vec_size=1)
        row, (group, value, columns) = self.index, self.part

        @pl.loop(0, self.count)
        def _append(index):
            node, place = self.path_ref[self.sequence, index], (self.held + index) % capacity
            at = self.sequence, node, group
            v = load(nodes.v.at[*at, value, columns], BY_COLUMN)
            key = load(nodes.k.at[*at], of_key)
            g, beta = nodes.g[*at, value], nodes.beta[*at, value]
            window.v[row, place, group, value, columns] = v

            @pl.when(part < values)
            def _strengths():
                window.g[row, place, group, value] = g
                window.beta[row, place, group, value] = beta

            @pl.when(part == 0)
            def _key():
                window.k[row, place, group] = key

    def move_channels(self, channels_ref: Any, new_ref: Any, past: int) -> None:
        """Keep the last inputs of the convolution: those that stay move to lower places."""
        width, group = channels_ref.shape[-1], self.part[0]
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
        taken = []
        for tap in range(past):
            place = self.count + tap
            node = self.path_ref[self.sequence, jnp.maximum(place - past, 0)]
            stays = load(channels_ref.at[self.index, jnp.minimum(place, past - 1), group], layout)
            new = load(new_ref.at[self.sequence, node, group, pl.ds(0, width)], layout)
            taken.append(jnp.where(place < past, stays, new))
        for tap, entries in enumerate(taken):
            channels_ref[self.index, tap, group] = entries
