"""The shared memory of a thread block (CTA) and its barriers, for the kernel in mosaic_gpu.py."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.float8 import BYTES
from pallas_kernels.paged_attention.plan import AttentionPlan
from pallas_kernels.paged_attention.tuning import ROWS
from pallas_kernels.shared_memory import SWIZZLED, swizzled_bytes

PADDING = 8  # entries; without, the eight rows that a warp writes at once would share a bank


def scratch(plan: AttentionPlan, dtype: Any) -> dict[str, Any]:
    """Types of the shared memory and the barriers; ``dtype`` is that of queries and output."""
    return {**_memory(plan, dtype), **_barriers(plan)}


def named(plan: AttentionPlan, refs: dict[str, Any]) -> dict[str, Any]:
    """Refs of what ``scratch`` declares, each by its name.

    ``rows``: where queries arrive, if they do not arrive where they stay. ``split_out``: parts of
    the merged rows, each of some columns.
    """
    refs = dict(refs)
    (refs["queries"], *rows), *out_rows = refs.pop("queries_or_out")
    if rows:
        [refs["rows"]] = rows
    ((refs["out_rows"],),) = out_rows or [[refs["rows"]]]
    (refs["k"], *k_bytes), *after_keys = refs.pop("k_or_out")
    (refs["v"], *v_bytes), *after_values = refs.pop("v_or_log_sums")
    if plan.float8:
        [refs["k_bytes"]], [refs["v_bytes"]] = k_bytes, v_bytes
    if plan.config.splits > 1:
        *refs["split_out"], refs["log_sums"] = *after_keys[0], *after_values[0]
    return refs


def _memory(plan: AttentionPlan, dtype: Any) -> dict[str, Any]:
    """Queries, keys and values, and what takes their place later.

    The merge comes after the last keys and values. With large heads there is no memory for rows of
    queries beside the tiles that tensor cores read, nor for log-sum-exps beside merged rows: rows
    of the output take the place of queries, and log-sum-exps are of a few columns.
    """
    config = plan.config
    tile = (config.consumers, ROWS, plan.head_dim)
    ring = (config.stages, config.heads, config.block, plan.head_dim)
    merged, log_sums = (
        plgpu.SMEM((*tile[:2], columns + PADDING), jnp.float32)
        for columns in (plan.merged_columns, plan.log_sum_columns)
    )
    splits = config.splits > 1

    def swizzled(shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)

    def blocks() -> list[Any]:
        if not plan.float8:
            return [swizzled(ring)]
        shape = (config.byte_stages, *ring[1:])
        narrow = plgpu.SMEM(shape, BYTES, transforms=swizzled_bytes(plan.head_dim))
        return [swizzled(ring), narrow]

    def and_then(first: list[Any], second: list[Any]) -> Any:
        """Memory for ``first`` and later for ``second``; if that is nothing, nested alike."""
        if not second:
            return [first]
        # The interpreter knows no unions.
        return [first, second] if plan.interpret else plgpu.RefUnion(first, second)

    # Rows of a part are stored in float32, where queries were.
    rows = plgpu.SMEM(tile, dtype)
    rows_f32 = plgpu.SMEM((*tile[:2], plan.stored_columns), jnp.float32)
    if plan.large:
        queries = and_then([swizzled(tile)], [rows_f32 if plan.partial else rows])
    else:
        queries = and_then([swizzled(tile), rows], [rows_f32] if plan.partial else [])
    after_values = [merged, log_sums] if plan.large else [log_sums]
    memory = {
        "queries_or_out": queries,
        "k_or_out": and_then(blocks(), [merged] if splits else []),
        "v_or_log_sums": and_then(blocks(), after_values if splits else []),
    }
    if plan.partial:
        memory["row_log_sums"] = plgpu.SMEM((config.consumers, ROWS), jnp.float32)
    return memory


def _barriers(plan: AttentionPlan) -> dict[str, Any]:
    config = plan.config
    copies = config.heads * plan.pages_of_block  # TMA copies that fill a stage
    filled = 1 if plan.float8 else copies  # arrivals: of those copies, or of who widens
    barriers = {
        "k_full": plgpu.Barrier(num_arrivals=filled, num_barriers=config.stages),
        # Values of edge blocks have separate barriers, because the producer waits for them too.
        "v_full": plgpu.Barrier(num_arrivals=filled, num_barriers=config.stages + plan.num_edges),
        "k_free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        "v_free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
    }
    if not plan.large:
        barriers["q_full"] = plgpu.Barrier(num_arrivals=plan.tokens, num_barriers=config.consumers)
    if plan.num_edges:
        barriers["v_cleaned"] = plgpu.Barrier(num_barriers=plan.num_edges)
    if plan.float8:
        for name in ("k_arrived", "v_arrived"):
            barriers[name] = plgpu.Barrier(num_arrivals=copies, num_barriers=config.byte_stages)
    if config.splits > 1 or plan.partial:
        barriers["all_read"] = plgpu.Barrier(num_arrivals=config.consumers)
    if config.ping_pong:
        barriers["tensor_cores"] = plgpu.Barrier(num_barriers=config.consumers)
    return barriers
