"""Which positions tokens attend to where an indexer scores pools of consecutive tokens, in jnp.

A sequence's positions from its first on are cut into pools of N. A whole pool has one key: the sum
of its tokens' keys, channel by channel, weighted by a softmax of the tokens' gates. A token attends
to the best of the whole pools that it sees, and always to the tokens of its own unfinished one.

In memory each token has its key and its gate side by side. The last token of a pool has the pool's
key in place of its own, which nothing else reads. It is made of the last N tokens of that token's
own path. So every node of a tree that ends a pool has the pool of its branch, which its descendants
find on their paths, and which moves with the node when it is accepted: nothing is taken back.

Everything is computed by positions in a token's own text, whatever slots its nodes have. So the
choice of a text is that of plain decoding, ties included.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.latent_attention.chosen import BLOCK_BYTES, best_of, in_blocks, index_scores
from pallas_kernels.pages import QueryContext
from pallas_kernels.rope_kv_write.reference import read_rows, write_rows


class Pools(NamedTuple):
    """How an indexer pools, and how many positions it chooses.

    Attributes:
      size: N, the tokens of a pool.
      top_k: positions of whole pools that a token attends to at most, a multiple of N.
    """

    size: int
    top_k: int

    @property
    def most(self) -> int:
        """The most positions that a token attends to, its unfinished pool's included."""
        return self.top_k + self.size - 1


class Paths(NamedTuple):
    """Where the texts of T tokens of each sequence are.

    Attributes:
      last: int32 [B, T], the token's position in its text.
      context_lens: [B], positions that all texts share: they are in the slots of these numbers.
      nodes: int32 [B, T, W], of the positions after these, by depth: their slots past the context,
        W where there is none. None: in order.
    """

    last: Array
    context_lens: Array
    nodes: Array | None

    @classmethod
    def of(cls, context: QueryContext) -> "Paths":
        """The paths of a pass's tokens."""
        lens, size = context.context_lens, context.positions.shape[1]
        if context.ancestors is None:
            return cls(lens[:, None] + jnp.arange(size), lens, None)
        bits = (context.ancestors[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        mask = bits.reshape(*bits.shape[:2], -1) == 1
        width = mask.shape[-1]
        nodes = jnp.sort(jnp.where(mask, jnp.arange(width), width), axis=-1)
        return cls(lens[:, None] + jnp.sum(mask, axis=-1) - 1, lens, nodes)

    def slots(self, positions: Array) -> Array:
        """The slots in a sequence of positions [B, T, n] of each token's text. Of those past the
        token nothing is said."""
        if self.nodes is None:
            return positions
        lens = self.context_lens[:, None, None]
        depth = jnp.clip(positions - lens, 0, self.nodes.shape[-1] - 1)
        of_node = lens + jnp.take_along_axis(self.nodes, depth, axis=-1)
        return jnp.where(positions < lens, positions, of_node)


def write_pooled(
    pages: Array,
    rows: Array,
    slots: Array,
    places: Array,
    context: QueryContext,
    first_slot: int = 0,
) -> Array:
    """Write what is kept of T tokens of each sequence, and the keys of the pools that they end.

    Args:
      pages: [P, 1, K, 2 * D].
      rows: [B, T, 1, 2 * D], keys and gates side by side.
      slots: [B, T] they are written to; 0: the null page's.
      places: [N, D], what is added to a gate by its token's place in the pool.
      context: of the tokens; its page table leads to the tokens before them.
      first_slot: where the first pool begins.
    """
    pages, size = write_rows(pages, rows, slots), len(places)
    paths, slots = may_end(slots, context, size, first_slot)
    members = paths.last[..., None] + jnp.arange(1 - size, 1)  # [B, n, N]
    ends_pool = ((paths.last - first_slot) % size == size - 1) & (members[..., 0] >= first_slot)
    where = slots_in_pages(context, paths.slots(members), pages.shape[2])
    kept = read_rows(pages, where.reshape(len(where), -1))
    kept = kept.reshape(*where.shape, -1)  # [B, n, N, 2 * D]
    keys, gates = jnp.split(kept, 2, axis=-1)
    pooled = pool_keys(keys, gates, places)
    both = jnp.concatenate([pooled, gates[..., -1, :]], axis=-1)[:, :, None]
    return write_rows(pages, both, jnp.where(ends_pool, slots, 0))


def may_end(slots: Array, context: QueryContext, size: int, first_slot: int) -> tuple[Paths, Array]:
    """Those of a pass's tokens that may end a run of so many positions, the first of which begins
    at ``first_slot``: of consecutive tokens every ``size``-th, of a tree all nodes.

    Returns their paths, and their slots of ``slots`` [B, T]: the null page's where there is none.
    """
    paths = Paths.of(context)
    if paths.nodes is not None:
        return paths, slots
    first = (size - 1 - (context.context_lens - first_slot)) % size
    ends = first[:, None] + size * jnp.arange(-(-slots.shape[1] // size))
    inside, ends = ends < slots.shape[1], jnp.minimum(ends, slots.shape[1] - 1)
    slots = jnp.where(inside, jnp.take_along_axis(slots, ends, axis=1), 0)
    return paths._replace(last=jnp.take_along_axis(paths.last, ends, axis=1)), slots


def pool_keys(keys: Array, gates: Array, places: Array) -> Array:
    """The keys [..., D] of pools of N tokens with keys and gates [..., N, D]; places: [N, D]."""
    wide = gates.astype(jnp.float32) + places.astype(jnp.float32)
    weights = jax.nn.softmax(wide, axis=-2)
    return jnp.sum(weights * keys.astype(jnp.float32), axis=-2).astype(keys.dtype)


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("pools", "first_slot", "order_invariant", "block"))
@jax.named_scope("indexer")
def choose_pooled_slots(
    q: Array,
    weights: Array,
    pages: Array,
    context: QueryContext,
    *,
    pools: Pools,
    first_slot: int = 0,
    order_invariant: bool = False,
    block: int | None = None,
) -> Array:
    """The slots that T queries of each sequence attend to.

    Args:
      q, weights: [B, T, I, D] and float32 [B, T, I], of the indexer's I heads: see best_slots.
      pages: [P, 1, K, 2 * D], of write_pooled; they already hold the queries' tokens.
      pools: of more slots than it chooses there are.
      first_slot: where the first pool begins; order_invariant: as of paged_attention.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.

    Returns int32 [B, T, pools.most]: positions in the sequence's slots in ascending order, then the
    number of its slots where a query attends to fewer.
    """
    paths, width = Paths.of(context), q.shape[-1]
    num_slots = context.page_table.shape[1] * pages.shape[2]

    def keys_at(slots: Array) -> Array:
        """[B, n, D] of the tokens at a sequence's slots [B, n]."""
        where = slots_in_pages(context, slots[:, None], pages.shape[2])[:, 0]
        return read_rows(pages, where)[:, :, 0, :width]

    ends = pool_ends(num_slots, pools.size, first_slot)
    whole = WholePools(keys_at(jnp.broadcast_to(ends, (len(q), len(ends)))), ends)
    if paths.nodes is not None:
        nodes = context.context_lens[:, None] + jnp.arange(paths.nodes.shape[-1])
        whole = whole._replace(node_keys=keys_at(nodes))
    best = best_pools(q, weights, whole, paths, pools, order_invariant, block)
    chosen = chosen_positions(best, paths.last, pools, first_slot)
    return jnp.sort(jnp.where(chosen < 0, num_slots, paths.slots(chosen)), axis=-1)


class WholePools(NamedTuple):
    """The pools that tokens may attend to.

    Attributes:
      keys: [B, n, D].
      ends: [n], the position of the last token of each.
      node_keys: [B, W, D], of pools that end past what all texts share: at the nodes that end them.
    """

    keys: Array
    ends: Array
    node_keys: Array | None = None


def pool_ends(num_positions: int, size: int, first: int = 0) -> Array:
    """The last positions [n] of the whole pools of so many positions; the first begins at
    ``first``."""
    return jnp.arange(first + size - 1, num_positions, size)


def best_pools(
    q: Array,
    weights: Array,
    whole: WholePools,
    paths: Paths,
    pools: Pools,
    order_invariant: bool = False,
    block: int | None = None,
) -> Array:
    """The best pools of those that each token sees whole: int32 [B, T, k] in ascending order, n
    where it sees fewer. Scores and ties are those of best_slots; see there for the arguments."""
    count = min(pools.top_k // pools.size, len(whole.ends))
    num_nodes = 0 if whole.node_keys is None else whole.node_keys.shape[1]
    if block is None:
        block = BLOCK_BYTES // (4 * len(q) * q.shape[2] * (len(whole.ends) + num_nodes))

    def chosen(q: Array, weights: Array, last: Array, *nodes: Array) -> Array:
        scores = index_scores(q, weights, whole.keys, order_invariant)
        if nodes and whole.node_keys is not None:
            of_nodes = index_scores(q, weights, whole.node_keys, order_invariant)
            beyond = whole.ends - paths.context_lens[:, None]  # [B, n]
            depth = jnp.clip(beyond, 0, num_nodes - 1)[:, None]
            depth = jnp.broadcast_to(depth, (*q.shape[:2], depth.shape[-1]))
            node = jnp.minimum(jnp.take_along_axis(nodes[0], depth, axis=-1), num_nodes - 1)
            of_nodes = jnp.take_along_axis(of_nodes, node, axis=-1)
            scores = jnp.where(beyond[:, None] >= 0, of_nodes, scores)
        return best_of(scores, whole.ends <= last[..., None], count)

    nodes = () if paths.nodes is None else (paths.nodes,)
    return in_blocks(chosen, (q, weights, paths.last, *nodes), block)


def chosen_positions(best: Array, last: Array, pools: Pools, first: int = 0) -> Array:
    """The positions of chosen pools [B, T, k], and of those tokens of an unfinished pool that end
    with the text: int32 [B, T, pools.most], -1 where there are fewer.

    last: [B, T], the text's last position; first: where the first pool begins.
    """
    inside = jnp.arange(pools.size)
    starts = first + pools.size * best
    of_pools = jnp.where(
        (starts + pools.size - 1 <= last[..., None])[..., None], starts[..., None] + inside, -1
    )
    start = last + 1 - (last + 1 - first) % pools.size
    tail = start[..., None] + inside[:-1]
    tail = jnp.where(tail <= last[..., None], tail, -1)
    both = jnp.concatenate([of_pools.reshape(*last.shape, -1), tail], axis=-1)
    missing = pools.most - both.shape[-1]
    return jnp.pad(both, [(0, 0), (0, 0), (0, missing)], constant_values=-1)


def slots_in_pages(context: QueryContext, slots: Array, page_size: int) -> Array:
    """The slots in memory of a sequence's slots [B, T, n]; the null page's outside of its table."""
    table = context.page_table
    column = slots // page_size
    fits = (slots >= 0) & (column < table.shape[1])
    columns = jnp.where(fits, column, 0).reshape(len(table), -1)
    page = jnp.take_along_axis(table, columns, axis=1).reshape(slots.shape)
    return jnp.where(fits, page * page_size + slots % page_size, 0)
