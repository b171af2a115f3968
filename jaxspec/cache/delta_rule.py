"""The gated delta rule: one token after the other, in chunks, and over trees of tokens.

The state S [Dk, Dv] of a value head maps keys to values. A token with query q, key k, value v, log
of the decay g and strength beta changes it, then reads it (Yang et al., arXiv 2412.06464):

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

All functions are of B rows, G key heads with r value heads each, and T tokens, in float32. S is
[B, G, r, Dv, Dk], transposed, because that is how a GPU reads it. An invalid token changes nothing,
whatever its inputs are: it is selected away.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.delta_rule import Tokens
from pallas_kernels.delta_rule.tokens import select_tokens

LONGEST_CHUNK = 64  # of ``sequences``: longer ones take more work, shorter ones more steps


@pytree
class DeltaInputs(Pytree):
    """What tokens do to the state. Without the queries: nothing needs them again."""

    k: Array = array("batch", "length", "kv_heads", "head_dim")  # [B, T, G, Dk], unit length
    v: Array = array("batch", "length", "kv_heads", "group", "head_dim")  # [B, T, G, r, Dv]
    g: Array = array("batch", "length", "kv_heads", "group")  # [B, T, G, r], at most 0
    beta: Array = array("batch", "length", "kv_heads", "group")  # [B, T, G, r]

    has_kernels: ClassVar[bool] = True

    @classmethod
    def shapes(cls, rows: int, length: int, heads: tuple[int, int, int, int]) -> Self:
        """ShapeDtypeStructs of so many tokens of rows; ``heads``: G, r, Dk, Dv."""
        groups, values, k_dim, v_dim = heads
        return cls(
            k=_float32(rows, length, groups, k_dim),
            v=_float32(rows, length, groups, values, v_dim),
            g=_float32(rows, length, groups, *cls.decay_shape(values, k_dim)),
            beta=_float32(rows, length, groups, values),
        )

    @classmethod
    def decay_shape(cls, values: int, k_dim: int) -> tuple[int, ...]:
        """The shape of a token's decays in a group: a decay for each value head."""
        return (values,)

    def where(self, valid: Array) -> Self:
        """The same, where tokens that are not ``valid`` [B, T] change nothing."""
        return jax.tree.map(lambda x: select_tokens(valid, x, 0), self)

    def fold(self, s: Array) -> Array:
        """The state after these consecutive tokens."""
        return fold(s, self)

    def chunk(self, s: Array, q: Array) -> tuple[Array, Array]:
        """Outputs of these consecutive tokens with queries q, and the state after them."""
        return chunk(s, q, self)

    def tree(self, s: Array, q: Array, nodes: Self, ancestors: Array, depth: Array) -> Array:
        """Outputs of a tree's nodes after these consecutive tokens: see the function."""
        return tree(s, self, q, nodes, ancestors, depth)

    def sequences(self, q: Array) -> Array:
        """Outputs of whole sequences of these tokens with queries q: see the function."""
        return sequences(q, self)

    def in_chunk(self, s: Array, log_decay: Array) -> Array:
        """What each of C consecutive tokens writes after S: d [B, G, r, C, Dv] (see chunk_writes).
        log_decay: [B, G, r, C], since S.

        The triangular system is that of Yang et al., arXiv 2406.06484 (the UT transform).
        """
        beta, v = self.beta.transpose(0, 2, 3, 1), self.v.transpose(0, 2, 3, 1, 4)
        gram = einsum("bigd,bjgd->bgij", self.k, self.k)[:, :, None]
        before = jnp.tri(gram.shape[-1], k=-1, dtype=bool)
        system = beta[..., None] * decays(log_decay, before) * gram
        from_s = jnp.exp(log_decay)[..., None] * einsum("bigd,bgred->bgrie", self.k, s)
        return einsum("bgrij,bgrje->bgrie", inverse(system), beta[..., None] * (v - from_s))

    def in_tree(self, held: Array) -> Array:
        """What each of a tree's nodes writes, where the decayed state has ``held`` [B, G, r, N, Dv]
        at its key."""
        beta, v = self.beta.transpose(0, 2, 3, 1), self.v.transpose(0, 2, 3, 1, 4)
        return beta[..., None] * (v - held)

    @property
    def tokens(self) -> Tokens:
        """The same, as kernels take them."""
        return Tokens(self.k, self.v, self.g, self.beta)


def _float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32))


def recurrence(s: Array, q: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
    """The definition, token by token: outputs [B, T, G, r, Dv] and the state after the last.

    q is [B, T, G, Dk].
    """

    def step(s: Array, token: tuple[Array, DeltaInputs]) -> tuple[Array, Array]:
        q, token_input = token
        s = jnp.exp(token_input.g)[..., None, None] * s
        written = token_input.beta[..., None] * (
            token_input.v - einsum("bgd,bgred->bgre", token_input.k, s)
        )
        s = s + written[..., None] * token_input.k[:, :, None, None, :]
        return s, einsum("bgd,bgred->bgre", q, s)

    first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, inputs))
    s, out = lax.scan(step, s, first)
    return jnp.moveaxis(out, 0, 1), s


def chunk_writes(s: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
    """What each of C consecutive tokens writes, and its decay since S.

    XLA compiles this and _after_chunk without what is around them, so that all programs round
    alike.

    Returns d [B, G, r, C, Dv], so that S after token i is the sum of k_j d_j^T over j <= i, each
    decayed, plus the decayed S; and log decays [B, G, r, C].
    """
    s, inputs = lax.optimization_barrier((s, inputs))
    log_decay = jnp.cumsum(inputs.g, axis=1).transpose(0, 2, 3, 1)
    return lax.optimization_barrier((inputs.in_chunk(s, log_decay), log_decay))


def fold(s: Array, inputs: DeltaInputs) -> Array:
    """The state after C consecutive tokens."""
    writes, log_decay = chunk_writes(s, inputs)
    return _after_chunk(s, inputs, writes, log_decay)


def chunk(s: Array, q: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
    """Outputs [B, C, G, r, Dv] of C consecutive tokens with queries [B, C, G, Dk], and the state
    after them, the same as fold's."""
    writes, log_decay = chunk_writes(s, inputs)
    size = q.shape[1]
    scores = einsum("bigd,bjgd->bgij", q, inputs.k)[:, :, None]
    scores = scores * decays(log_decay, jnp.tri(size, dtype=bool))
    out = jnp.exp(log_decay)[..., None] * einsum("bigd,bgred->bgrie", q, s)
    out = out + einsum("bgrij,bgrje->bgrie", scores, writes)
    return out.transpose(0, 3, 1, 2, 4), _after_chunk(s, inputs, writes, log_decay)


def by_chunks[Inputs: DeltaInputs](
    step: Callable[[Array, tuple[Array, Inputs]], tuple[Array, Array]],
    q: Array,
    inputs: Inputs,
    longest: int = LONGEST_CHUNK,
) -> Array:
    """Outputs [B, T, G, r, Dv] of whole sequences with queries [B, T, G, Dk], from empty states,
    chunk by chunk. All tokens are valid.

    ``step``: from a state and the queries and inputs of C tokens to the state after these and their
    outputs [B, C, G, r, Dv]; ``longest``: most tokens C.
    """

    def chunks(x: Array) -> Array:
        """[B, T, ...] -> [m, B, C, ...]."""
        return jnp.moveaxis(_cut(x, longest), 1, 0)

    empty = jnp.zeros((*inputs.v.shape[:1], *inputs.v.shape[2:], q.shape[-1]), inputs.v.dtype)
    _, out = lax.scan(step, empty, (chunks(q), jax.tree.map(chunks, inputs)))
    return _joined(jnp.moveaxis(out, 0, 1), q.shape[1])


def _cut(x: Array, longest: int) -> Array:
    """[B, T, ...] -> [B, m, C, ...], chunks of at most ``longest`` tokens, with tokens at the end
    that change nothing."""
    length = x.shape[1]
    count = -(-length // longest)
    size = -(-length // count)
    padded = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
    return padded.reshape(len(x), count, size, *x.shape[2:])


def _joined(chunks: Array, length: int) -> Array:
    """[B, m, C, ...] -> [B, T, ...], without the tokens past ``length``."""
    return chunks.reshape(len(chunks), -1, *chunks.shape[3:])[:, :length]


def sequences(q: Array, inputs: DeltaInputs) -> Array:
    """Outputs [B, T, G, r, Dv] of whole sequences with queries [B, T, G, Dk], from empty states.
    All tokens are valid.

    For training: as little as possible depends on the state, the rest is computed for all chunks
    at once. So the sequential part is two products a chunk, and its gradient four. Rounds otherwise
    than ``chunk``.
    """
    length = q.shape[1]

    def chunks(x: Array) -> Array:
        """[B, T, G, ...] -> [m, B, G, C, ...]."""
        return jnp.moveaxis(_cut(x, LONGEST_CHUNK), (1, 2), (0, 3))

    q, k, v = chunks(q), chunks(inputs.k), jnp.moveaxis(chunks(inputs.v), 3, 4)
    beta = jnp.moveaxis(chunks(inputs.beta), 3, 4)[..., None]  # [m, B, G, r, C, 1]
    log_decay = jnp.cumsum(jnp.moveaxis(chunks(inputs.g), 3, 4), axis=-1)  # [m, B, G, r, C]
    decay, total = jnp.exp(log_decay)[..., None], log_decay[..., -1:]
    by_head, size = k[:, :, :, None], k.shape[3]
    gram = einsum("mbgid,mbgjd->mbgij", k, k)[:, :, :, None]
    system = beta * decays(log_decay, jnp.tri(size, k=-1, dtype=bool)) * gram
    inverse = differentiable_inverse(system)
    of_values = einsum("mbgrij,mbgrje->mbgrie", inverse, beta * v)
    of_state = einsum("mbgrij,mbgrjd->mbgrid", inverse, beta * decay * by_head)
    kept = jnp.exp(total - log_decay)[..., None] * by_head

    def step(s: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        """``s`` [B, G, r, Dk, Dv], not transposed here."""
        of_values, of_state, kept, total = part
        writes = of_values - einsum("bgrid,bgrde->bgrie", of_state, s)
        after = jnp.exp(total)[..., None] * s + einsum("bgrid,bgrie->bgrde", kept, writes)
        return after, (s, writes)

    empty = jnp.zeros((*v.shape[1:4], k.shape[-1], v.shape[-1]), v.dtype)
    _, (s, writes) = lax.scan(step, empty, (of_values, of_state, kept, total))
    scores = einsum("mbgid,mbgjd->mbgij", q, k)[:, :, :, None]
    scores = scores * decays(log_decay, jnp.tri(size, dtype=bool))
    out = decay * einsum("mbgid,mbgrde->mbgrie", q, s)
    out = out + einsum("mbgrij,mbgrje->mbgrie", scores, writes)
    return _joined(out.transpose(1, 0, 4, 2, 3, 5), length)  # of [B, m, C, G, r, Dv]


def tree(
    s: Array,
    window: DeltaInputs,
    q: Array,
    nodes: DeltaInputs,
    ancestors: Array,
    depth: Array,
) -> Array:
    """Outputs [B, N, G, r, Dv] of all nodes of a tree, each after its own ancestors and itself.

    Not the states of the nodes are computed, but what their keys and queries read from them: the
    recurrence, projected. It runs over depths, all nodes of all paths at once. Every step of a node
    depends on its own path alone, in the order of the path. So where products of vectors round
    alike, a node has the same bits in every tree, and no node sees another branch's NaN. (Some
    backends' products depend on the place of a row: then bits differ by rounding.)

    Args:
      s: the state before the window.
      window: C consecutive committed tokens before the tree.
      q: [B, N, G, Dk].
      ancestors: bool [B, N, N], whether node j is node i or one of its ancestors.
      depth: int32 [B, N], of a root 0.
    """
    readers = jnp.stack([nodes.k, q], axis=1)  # [B, 2, N, G, Dk]
    read = _after_window(s, window, readers)
    gram = einsum("bxigd,bjgd->bgxij", readers, nodes.k)[:, :, None]  # [B, G, 1, 2, N, N]
    decay = jnp.exp(nodes.g).transpose(0, 2, 3, 1)  # [B, G, r, N]

    def step(level: Array, read: Array) -> Array:
        """``read`` [B, G, r, 2, N, Dv] after the ancestors at this depth."""
        at_level = ancestors & (depth == level)[:, None, :]
        node = jnp.argmax(at_level, axis=-1)  # [B, N]
        node_decay = _at(decay, node)[..., None]
        writes = nodes.in_tree(decay[..., None] * read[..., 0, :, :])
        written = jnp.take_along_axis(writes, node[:, None, None, :, None], axis=-2)
        product = jnp.take_along_axis(gram, node[:, None, None, None, :, None], axis=-1)
        after = node_decay[..., None, :, :] * read + product * written[..., None, :, :]
        reached = jnp.any(at_level, axis=-1)[:, None, None, None, :, None]
        return jnp.where(reached, after, read)

    if q.shape[1] == 1:
        read = step(jnp.int32(0), read)
    else:
        read = lax.fori_loop(0, jnp.max(depth) + 1, step, read)
    return read[..., 1, :, :].transpose(0, 3, 1, 2, 4)


def _after_window(s: Array, window: DeltaInputs, readers: Array) -> Array:
    """What readers [B, 2, N, G, Dk] read from the state after a window: [B, G, r, 2, N, Dv]."""
    writes, log_decay = chunk_writes(s, window)
    total = log_decay[..., -1:]
    kept = jnp.exp(total - log_decay)[..., None] * writes
    scores = einsum("bxigd,bjgd->bgxij", readers, window.k)
    from_s = einsum("bxigd,bgred->bgrxie", readers, s)
    from_window = einsum("bgxij,bgrje->bgrxie", scores, kept)
    return jnp.exp(total)[..., None, None] * from_s + from_window


def inverse(below: Array) -> Array:
    """The inverse of I + below [..., C, C], which is strictly lower triangular.

    By blocks: those of the diagonal, inverted, give those of twice the size. Products of matrices
    round alike wherever they are; the solvers of linear algebra libraries need not.
    """
    size = below.shape[-1]
    place, block = jnp.arange(size), 1
    result = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    while block < size:
        block_of = place // block
        pair = (block_of[:, None] == block_of + 1) & (block_of % 2 == 0)
        between = einsum("...ij,...jk->...ik", result, jnp.where(pair, below, 0))
        result = result - einsum("...ij,...jk->...ik", between, result)
        block *= 2
    return result


@jax.custom_vjp
def differentiable_inverse(below: Array) -> Array:
    """``inverse``, of which the gradient keeps the result alone, and none of the blocks."""
    return inverse(below)


def _inverse_forward(below: Array) -> tuple[Array, Array]:
    result = inverse(below)
    return result, result


def _inverse_backward(result: Array, cotangent: Array) -> tuple[Array]:
    """From M = (I + L)^-1 follows dM = -M dL M."""
    left = einsum("...ji,...jk->...ik", result, cotangent)
    return (jnp.tril(-einsum("...ij,...kj->...ik", left, result), -1),)


differentiable_inverse.defvjp(_inverse_forward, _inverse_backward)


def _after_chunk(s: Array, inputs: DeltaInputs, writes: Array, log_decay: Array) -> Array:
    s, k, writes, log_decay = lax.optimization_barrier((s, inputs.k, writes, log_decay))
    total = log_decay[..., -1:]
    kept = jnp.exp(total - log_decay)[..., None] * writes
    after = jnp.exp(total)[..., None] * s + einsum("bjgd,bgrje->bgred", k, kept)
    return lax.optimization_barrier(after)


def decays(log_decay: Array, seen: Array) -> Array:
    """Decay from token j to token i, 0 where j is not ``seen`` [C, C] by i: [..., C, C]."""
    difference = log_decay[..., :, None] - log_decay[..., None, :]
    return jnp.where(seen, jnp.exp(jnp.where(seen, difference, 0)), 0)


def _at(x: Array, node: Array) -> Array:
    """x [B, G, r, N] at node [B, N]."""
    return jnp.take_along_axis(x, node[:, None, None, :], axis=-1)


def einsum(equation: str, a: Array, b: Array) -> Array:
    """The product of two arrays in the precision of float32."""
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
