"""The draft tree that every drafter returns, and its packed ancestor masks."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class DraftTree(Pytree):
    """Drafted tokens of each sequence as a tree; node 0, the root, is the last committed token.

    A parent comes before its children. Siblings hold distinct tokens, in the order they were
    proposed. Nodes from ``num_nodes`` on are padding. A node's ancestors include itself.

    If tokens were drawn at random, ``probs`` holds for each node the distribution (over this
    device's vocabulary shard) that its token was drawn from; the root's entry is not used. None
    means that the tree is a deterministic function of the tokens before it.

    ``confidence`` is a chain's, if the call asked for it: how likely, as the drafter sees it, the
    token of each depth is accepted if those before it are.
    """

    tokens: Array = array("batch", "nodes")  # int32 [B, N]
    parents: Array = array("batch", "nodes")  # int32 [B, N]; -1 for the root and padding
    depth: Array = array("batch", "nodes")  # int32 [B, N]; 0 for the root and padding
    ancestors: Array = array("batch", "nodes", "words")  # uint32 [B, N, ceil(N / 32)]
    num_nodes: Array = array("batch")  # int32 [B]
    probs: Array | None = array("batch", "nodes", "vocab")  # float32 [B, N, V / shards]
    confidence: Array | None = array("batch", "depth", default=None)  # float32 [B, max_depth]
    max_depth: int = static()
    is_chain: bool = static()


def make_tree(
    tokens: Array,
    parents: Array,
    num_nodes: Array | np.ndarray,
    max_depth: int,
    *,
    is_chain: bool = False,
    probs: Array | None = None,
) -> DraftTree:
    """A DraftTree from tokens and parents [B, N]; nodes from ``num_nodes`` [B] on are padding.
    ``is_chain``: the parents are known, and those given are not read.

    Padding repeats the root: it then goes through the root's experts, which are read anyway.
    """
    size = tokens.shape[1]
    index = np.arange(size)
    valid = index < num_nodes[:, None]
    if is_chain:  # constants
        above, depth, ancestors = index - 1, index, pack_constant(np.tri(size, dtype=bool))
    else:
        above = jnp.where(valid & (index > 0), parents, -1)
        closure = ancestor_closure(above, max_depth)
        depth = jnp.sum(closure, axis=-1, dtype=jnp.int32) - 1
        ancestors = pack_mask(closure)
    return DraftTree(
        tokens=jnp.where(valid, tokens, tokens[:, :1]).astype(jnp.int32),
        parents=jnp.where(valid, above, -1).astype(jnp.int32),
        depth=jnp.where(valid, depth, 0).astype(jnp.int32),
        # A padding node sees no node of the tree, not even itself: its slot is never written.
        ancestors=jnp.where(valid[:, :, None], ancestors, jnp.uint32(0)),
        num_nodes=jnp.asarray(num_nodes, jnp.int32),
        probs=probs,
        max_depth=max_depth,
        is_chain=is_chain,
    )


def make_chain(
    tokens: Array, num_nodes: Array | np.ndarray, probs: Array | None = None
) -> DraftTree:
    """The tree in which the parent of node ``i`` is node ``i - 1``: tokens [B, N], root first."""
    batch, size = tokens.shape
    parents = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32) - 1, (batch, size))
    return make_tree(tokens, parents, num_nodes, size - 1, is_chain=True, probs=probs)


def root_only(tokens: Array) -> DraftTree:
    """The tree of plain decoding: only the last committed tokens [B]."""
    return make_chain(tokens[:, None], np.ones(len(tokens), np.int32))


def pad_tree(tree: DraftTree, width: int) -> DraftTree:
    """The same tree, padded to ``width`` nodes.

    Raises ValueError if the tree has more nodes than that.
    """
    batch, size = tree.tokens.shape
    if size > width:
        raise ValueError(f"a tree of {size} nodes cannot be padded to {width}")
    if size == width:
        return tree

    def widen(x: Array, fill: int) -> Array:
        pad = ((0, 0), (0, width - size), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, pad, constant_values=fill)

    return make_tree(
        widen(tree.tokens, 0),
        widen(tree.parents, -1),
        tree.num_nodes,
        tree.max_depth,
        is_chain=tree.is_chain,
        probs=None if tree.probs is None else widen(tree.probs, 0),
    ).replace(confidence=tree.confidence)


def path_tokens(tree: DraftTree) -> Array:
    """Tokens of each node and its ancestors, root not included, from the node upwards.

    int32 [B, N, max_depth], padded with -1.
    """
    batch, size = tree.tokens.shape
    node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    tokens = []
    for _ in range(tree.max_depth):
        parent, token = (jnp.take_along_axis(x, node, axis=1) for x in (tree.parents, tree.tokens))
        tokens.append(jnp.where(parent >= 0, token, -1))
        node = jnp.maximum(parent, 0)
    if not tokens:
        return jnp.zeros((batch, size, 0), jnp.int32)
    return jnp.stack(tokens, axis=-1)


def ancestor_closure(parents: Array, max_depth: int) -> Array:
    """Whether node j is node i or one of its ancestors: parents [B, N] -> bool [B, N, N]."""
    size = parents.shape[1]
    closure = jnp.broadcast_to(jnp.eye(size, dtype=bool), (*parents.shape, size))
    pointer = parents
    for _ in range(max_depth):
        closure |= pointer[:, :, None] == jnp.arange(size)
        grandparent = jnp.take_along_axis(parents, jnp.maximum(pointer, 0), axis=1)
        pointer = jnp.where(pointer >= 0, grandparent, -1)
    return closure


def pack_mask(mask: Array) -> Array:
    """Pack 32 columns into each word: bool [..., N] -> uint32 [..., ceil(N / 32)]."""
    *lead, size = mask.shape
    words = -(-size // 32)
    padded = jnp.pad(mask, [(0, 0)] * len(lead) + [(0, words * 32 - size)])
    bits = padded.reshape(*lead, words, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def pack_constant(mask: np.ndarray) -> np.ndarray:
    """pack_mask of a constant, as a constant."""
    padding = -mask.shape[-1] % 32
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, padding)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


def unpack_mask(words: Array, size: int) -> Array:
    """The inverse of pack_mask: uint32 [..., words] -> bool [..., size]."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :size] == 1


def path_to(tree: DraftTree, leaf: Array) -> tuple[Array, Array]:
    """Nodes from the root to ``leaf`` [B], by depth: (int32 [B, A], depth [B])."""
    size = tree.tokens.shape[1]
    depths = jnp.arange(tree.max_depth + 1)
    if tree.is_chain:  # a node's index is its depth
        leaf = leaf.astype(jnp.int32)
        return jnp.where(depths <= leaf[:, None], depths, 0), leaf
    words = jnp.take_along_axis(tree.ancestors, leaf[:, None, None], axis=1)[:, 0]
    on_path = unpack_mask(words, size)  # [B, N]
    at_depth = on_path[:, None, :] & (tree.depth[:, None, :] == depths[:, None])  # [B, A, N]
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    return path, jnp.take_along_axis(tree.depth, leaf[:, None], axis=1)[:, 0]
