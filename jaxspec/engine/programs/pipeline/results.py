"""What groups of rows emitted, put together as one call's result. These run on the device."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspec.decoding.state import Emitted, concatenated
from jaxspec.parallel import Layout, partition_specs

ROWS = "rows"  # a name for the axis of rows, to find it


def joined_rounds(groups: list[list[Emitted]], places: jax.Array) -> Emitted:
    """What the groups of a call emitted in its rounds, one after the other, for its rows [B], which
    have these places in the groups."""
    rounds = [concatenated(parts, "rounds").replace(num_rounds=len(parts)) for parts in groups]
    return _at_places(rounds, places)


def joined_reads(groups: list[list[Emitted]], places: jax.Array, *, width: int) -> Emitted:
    """What joined_rounds gives, of reads: a row's first token is that of its last piece."""
    reads = []
    for pieces in groups:
        whole = concatenated(pieces, "length")
        if whole.prompt is not None:
            missing = width - whole.prompt.valid.shape[1]
            prompt = jax.tree.map(
                lambda x, missing=missing: jnp.pad(
                    x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))
                ),
                whole.prompt,
            )
            whole = whole.replace(prompt=prompt)
        reads.append(whole)
    return _at_places(reads, places)


def _at_places(groups: list[Emitted], places: jax.Array) -> Emitted:
    whole = concatenated(groups, "batch")

    def chosen(x: jax.Array, spec: P) -> jax.Array:
        axis = tuple(spec).index(ROWS) if ROWS in tuple(spec) else None
        return x if axis is None else jnp.take(x, places, axis=axis)

    return jax.tree.map(chosen, whole, partition_specs(whole, Layout(batch=(ROWS,))))
