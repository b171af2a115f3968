"""A tree's read as one triangular system: only to be timed beside delta_read, which goes by depth.

What the tokens of a chunk write to the state solves a triangular system (the WY representation and
UT transform of Yang et al., arXiv 2406.06484, and with decays the chunked gated delta rule of arXiv
2412.06464). Over a tree the mask of the system is that of the strict ancestors instead of the
tokens before, and decays accumulate along each node's own path. The window's tokens are ancestors
of all nodes.

Equal to delta_read up to rounding, not bit by bit. Sums run over the nodes of all branches, with
zeros where a node is no ancestor: so 0 x NaN brings the NaN of another branch, and a path's bits
depend on its places in the tree wherever a product's order of summation does (docs/exactness.md).
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_rule.tokens import Tokens


def transform_read(
    s: Array,
    window: Tokens,
    rows: Array,
    held: Array,
    q: Array,
    nodes: Tokens,
    ancestors: Array,
    depth: Array,
    levels: int | None = None,
) -> Array:
    """Outputs of a tree's nodes, as of ``pallas_kernels.delta_rule.delta_read``.

    The states and windows of the rows are gathered: ``s[rows]`` is a copy, then read once by all
    keys and queries in one product. The system is solved by blocks, the window's tokens before the
    nodes: what the former write is known when the latter are solved. Each block is multiplied by
    its inverse, which takes two products for each doubling of the longest path after the first; no
    solver of a library, and no loop.

    Args:
      s, window, rows, held, q, nodes, ancestors, depth: as of ``delta_read``.
      levels: more than the depth of any node; N if None. Fewer levels take fewer products.

    Returns float32 [B, N, G, r, Dv].
    """
    capacity, size = window.k.shape[1], q.shape[1]
    own = _first(Tokens(*(x[rows] for x in window)), held)
    keys = jnp.concatenate([own.k, nodes.k], axis=1)  # [B, C + N, G, Dk]
    readers = jnp.concatenate([keys, q], axis=1)  # [B, C + 2N, G, Dk]
    gram = _einsum("bxgd,bygd->bgxy", readers, keys)[:, :, None]  # [B, G, 1, C + 2N, C + N]
    from_s = _einsum("bxgd,bgred->bgrxe", readers, s[rows])  # [B, G, r, C + 2N, Dv]
    by_window, by_nodes = gram[..., :capacity], gram[..., capacity:]

    # The window's tokens: each is after those before it.
    place, of_window, of_nodes = jnp.arange(capacity), slice(capacity), slice(capacity, -size)
    log_decay = jnp.cumsum(_by_head(own.g), axis=-1)  # [B, G, r, C]
    before = place[:, None] > place
    beta = _by_head(own.beta)[..., None]
    system = beta * _decays(log_decay, log_decay, before) * by_window[..., of_window, :]
    value = _values(own.v) - jnp.exp(log_decay)[..., None] * from_s[..., of_window, :]
    in_window = _solve(system, place, capacity, beta * value)  # [B, G, r, C, Dv]

    # The nodes: each is after the whole window and its strict ancestors.
    seen = ancestors[:, None, None]  # [B, 1, 1, N, N]
    path = jnp.sum(jnp.where(seen, _by_head(nodes.g)[..., None, :], 0), axis=-1)  # [B, G, r, N]
    since_s = log_decay[..., -1:] + path
    from_window = _decays(since_s, log_decay, True)  # [B, G, r, N, C]
    decays, strict = _decays(path, path, seen), seen & ~jnp.eye(size, dtype=bool)
    beta, whole = _by_head(nodes.beta)[..., None], jnp.exp(since_s)[..., None]
    read = whole * from_s[..., of_nodes, :] + _product(
        from_window * by_window[..., of_nodes, :], in_window
    )
    system = jnp.where(strict, beta * decays * by_nodes[..., of_nodes, :], 0)
    level = depth[:, None, None]  # [B, 1, 1, N]
    written = _solve(system, level, levels or size, beta * (_values(nodes.v) - read))

    # What the queries read, of the state, of the window and of the paths.
    scores = jnp.concatenate([from_window, decays], axis=-1) * gram[..., -size:, :]
    writes = jnp.concatenate([in_window, written], axis=-2)  # [B, G, r, C + N, Dv]
    out = whole * from_s[..., -size:, :] + _product(scores, writes)
    return out.transpose(0, 3, 1, 2, 4)


def _first(tokens: Tokens, held: Array) -> Tokens:
    """Tokens [B, C, ...] of which those past the first ``held`` [B] change nothing."""
    valid = jnp.arange(tokens.k.shape[1]) < held[:, None]
    return Tokens(
        *(jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0) for x in tokens)
    )


def _solve(system: Array, level: Array, levels: int, right: Array) -> Array:
    """The solution of (I + system) x = right; ``right`` is [..., T, Dv].

    Entries of ``system`` [..., T, T] that are not 0 lead from a token to one of a lower ``level``
    [..., T], of 0 to ``levels`` - 1.

    The inverse is found by blocks of 1, 2, 4, ... levels: from those of two neighbours follows that
    of both. Its entries stay of the size of writes, while powers of ``system`` would not.
    """
    if levels == 1:
        return right
    block, inverse = 1, jnp.eye(system.shape[-1], dtype=system.dtype)
    while block < levels:
        own = level // block
        upper, lower = own[..., :, None], own[..., None, :]
        between = jnp.where((upper == lower + 1) & (lower % 2 == 0), system, 0)
        if block > 1:
            between = _product(_product(inverse, between), inverse)
        inverse = inverse - between
        block *= 2
    return _product(inverse, right)


def _decays(to: Array, start: Array, seen: Array | bool) -> Array:
    """Decays [..., I, J] from tokens with the log decays ``start`` [..., J] to those with ``to``
    [..., I], 0 where not seen."""
    difference = to[..., :, None] - start[..., None, :]
    return jnp.where(seen, jnp.exp(jnp.where(seen, difference, 0)), 0)


def _by_head(x: Array) -> Array:
    """[B, T, G, r] -> [B, G, r, T]."""
    return x.transpose(0, 2, 3, 1)


def _values(v: Array) -> Array:
    """[B, T, G, r, Dv] -> [B, G, r, T, Dv]."""
    return v.transpose(0, 2, 3, 1, 4)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
