"""The gated delta rule on Hopper GPUs: a warpgroup per row, value head and 64 columns of its state.

The columns of a state do not depend on each other. A warpgroup holds 64 of them in registers, as
the rows of a tile, and applies tokens one by one, in their order.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.delta_rule.blocks import delta_run_mosaic
from pallas_kernels.delta_rule.commit import delta_commit_mosaic
from pallas_kernels.delta_rule.tiles import (
    BY_COLUMN,
    BY_KEY,
    COLUMNS,
    TILE,
    applied,
    copy_window,
    load,
    part_of,
    product,
    read_by,
)
from pallas_kernels.delta_rule.tokens import RowStates, Tokens
from pallas_kernels.mosaic_module_names import fixed_name

__all__ = ["delta_commit_mosaic", "delta_read_mosaic", "delta_run_mosaic"]

FEW_NODES = 4  # of a tree whose keys are multiplied here: two launches less


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def delta_read_mosaic(
    states: RowStates,
    q: Array,  # [B, N, G, Dk]
    nodes: Tokens,  # [B, N, ...]
    ancestors: Array,  # [B, N, N]
    depth: Array,  # [B, N]
    *,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.delta_rule.delta_read; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    s, window, rows, held = states
    _, groups, values, v_dim, k_dim = s.shape
    batch, size, length = *q.shape[:2], window.k.shape[1]
    grams = () if size <= FEW_NODES else (_gram(q, nodes.k),)
    level = jnp.arange(size)[:, None]
    at_level = ancestors[:, :, None] & (depth[:, None, None] == level)  # [B, N, levels, N]
    ancestor_at = jnp.argmax(at_level, axis=-1).astype(jnp.int32)

    @fixed_name(interpret)
    def delta_read_kernel(
        s_ref, wk_ref, wv_ref, wg_ref, wb_ref, rows_ref, held_ref, q_ref, k_ref, v_ref, g_ref,
        b_ref, ancestor_ref, depth_ref, *refs,
    ):  # fmt: skip
        *gram_refs, out_ref, written_ref, ck_ref, cv_ref, cg_ref, cb_ref = refs
        sequence, group = kernel_axes.index("sequence"), kernel_axes.index("group")
        value, columns = part_of(kernel_axes.index("part"), values)
        row, count = jnp.minimum(rows_ref[sequence], len(s) - 1), held_ref[sequence]
        window, part = Tokens(wk_ref, wv_ref, wg_ref, wb_ref), (group, value, columns)

        tokens = Tokens(ck_ref, cv_ref, cg_ref, cb_ref)

        def apply(place: Any, tile: Array) -> Array:
            key, v = load(tokens.k.at[place], BY_KEY), load(tokens.v.at[place], BY_COLUMN)
            return applied(tile, Tokens(key, v, tokens.g[place], tokens.beta[place]))

        tile = load(s_ref.at[row, group, value, columns], TILE)
        copy_window(window, (row, count), part, tokens)
        tile = lax.fori_loop(0, count, apply, tile)

        @pl.loop(0, size)
        def _node(node):
            key, query = (load(ref.at[sequence, node, group], BY_KEY) for ref in (k_ref, q_ref))

            def products(above: Any) -> tuple[Array, ...]:
                """Products of this node's key and query with the key of a node above."""
                if gram_refs:
                    [gram] = gram_refs
                    return tuple(gram[sequence, group, x, node, above] for x in range(2))
                other = load(k_ref.at[sequence, above, group], BY_KEY)
                return product(other, key), product(other, query)

            def after(level: Any, reads: tuple[Array, Array]) -> tuple[Array, Array]:
                above = ancestor_ref[sequence, node, level]
                decay = jnp.exp(g_ref[sequence, above, group, value])
                written = load(written_ref.at[above], BY_COLUMN)
                by_k, by_q = products(above)
                return decay * reads[0] + by_k * written, decay * reads[1] + by_q * written

            reads = read_by(tile, key), read_by(tile, query)
            by_key, by_query = lax.fori_loop(0, depth_ref[sequence, node], after, reads)
            decay = jnp.exp(g_ref[sequence, node, group, value])
            v = load(v_ref.at[sequence, node, group, value, columns], BY_COLUMN)
            written = b_ref[sequence, node, group, value] * (v - decay * by_key)
            written_ref[node] = written
            plgpu.commit_smem()
            out_ref[sequence, node, group, value, columns] = (
                decay * by_query + product(key, query) * written
            )

    kernel = plgpu.kernel(
        delta_read_kernel,
        out_type=jax.ShapeDtypeStruct((batch, size, groups, values, v_dim), jnp.float32),
        scratch_types=[
            plgpu.SMEM(shape, jnp.float32)
            for shape in ((size, COLUMNS), (length, k_dim), (length, COLUMNS), (length,), (length,))
        ],
        grid=(values * v_dim // COLUMNS, groups, batch),
        grid_names=kernel_axes.names("part", "group", "sequence"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # there are barriers where threads need them: few
        ),
        interpret=interpret,
    )
    return kernel(s, *window, rows, held, q, *nodes, ancestor_at, depth, *grams)


def _gram(q: Array, k: Array) -> Array:
    """Products with the keys of all nodes, of keys and of queries: [B, G, 2, N, N]."""
    readers = jnp.stack([k, q], axis=1)
    return jnp.einsum("bxigd,bjgd->bgxij", readers, k, precision=lax.Precision.HIGHEST)
