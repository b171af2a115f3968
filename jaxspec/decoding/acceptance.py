"""Acceptance rules: which drafted nodes are committed, and the token after them.

``Match`` samples the target at every node and follows the child that holds the sampled token. The
text is then a function of weights, prompt and seed only. ``Rejection`` is speculative sampling
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), extended to trees by trying
siblings in order (SpecInfer, arXiv 2305.09781). Both sample exactly from the target. To add your
own rule, write a class like these and pass it as SpeculationConfig(acceptance=...).
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import Proposal, sound_proposals
from jaxspec.decoding.sampling import Sampling, perturb, probabilities, vocab_ids
from jaxspec.decoding.sampling.noise import Stream, uniform
from jaxspec.decoding.trees.tree import DraftTree, path_to, unpack_mask
from jaxspec.parallel import Layout, collectives
from jaxspec.parallel.pytree import Pytree, array, pytree


@pytree
class Accepted(Pytree):
    """The outcome of a round before stop tokens and length limits. A = max_depth + 1.

    ``path[:, d]`` is the accepted node of depth d; past the accepted depth it is 0, the root.
    ``tokens[:, d]`` is the token committed after that node: the next accepted node's, or the bonus
    token at ``d = depth``. ``finite[:, d]`` says whether the logits of that node are finite. A rule
    sets it only if it gets it at no extra cost; None: the round computes it.
    """

    path: Array = array("batch", "depth")  # int32 [B, A]
    depth: Array = array("batch")  # int32 [B], drafted tokens accepted
    tokens: Array = array("batch", "depth")  # int32 [B, A]
    finite: Array | None = array("batch", "depth", default=None)  # bool [B, A]


@dataclasses.dataclass(frozen=True)
class Verified:
    """The input of a rule, for B rows.

    Attributes:
      tree: the drafted tree.
      logits: [B, N, V / shards] target logits at every node, processed by the rows' sampling.
      sampling: the rows' sampling parameters.
      context_lens: [B]; node i predicts the token at position context_lens + depth + 1.
      layout: how the vocabulary is split.
      greedy: no row samples.
    """

    tree: DraftTree
    logits: Array
    sampling: Sampling
    context_lens: Array
    layout: Layout
    greedy: bool = False


class AcceptanceRule(Protocol):
    """A frozen, hashable object, because it is a static argument of compiled programs."""

    def proposals(self, is_chain: bool) -> tuple[Proposal, ...]:
        """Proposals that keep the rule exact; the first is the default."""
        ...

    def accept(self, verified: Verified) -> Accepted:
        """The path to commit, and its tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class Match:
    """Follow the children that hold the target's own samples."""

    def proposals(self, is_chain: bool) -> tuple[Proposal, ...]:
        return sound_proposals("match", is_chain)

    def accept(self, verified: Verified) -> Accepted:
        tree = verified.tree
        sampled, finite = _finite_samples(verified)
        wanted = jnp.take_along_axis(sampled, jnp.maximum(tree.parents, 0), axis=1)
        is_root = jnp.arange(wanted.shape[1]) == 0
        matches = is_root | ((tree.tokens == wanted) & (tree.parents >= 0))
        path, depth = _deepest_path(tree, matches)
        tokens, finite = (jnp.take_along_axis(x, path, axis=1) for x in (sampled, finite))
        return Accepted(path=path, depth=depth, tokens=tokens, finite=finite)


def target_samples(verified: Verified) -> Array:
    """The token that the target samples after each node: int32 [B, N]."""
    return _finite_samples(verified)[0]


def _finite_samples(verified: Verified) -> tuple[Array, Array]:
    """The target's samples, and whether the logits of each node are finite: bool [B, N]."""
    logits, layout = verified.logits, verified.layout
    positions = verified.context_lens[:, None] + verified.tree.depth + 1
    ids = vocab_ids(logits.shape[-1], layout)
    noisy = perturb(logits, verified.sampling, positions, ids, greedy=verified.greedy)
    return collectives.finite_argmax(noisy, logits, layout)


def _deepest_path(tree: DraftTree, matches: Array) -> tuple[Array, Array]:
    """The path to the deepest node whose ancestors all match; see path_to."""
    size = tree.tokens.shape[1]
    if tree.is_chain:
        first_miss = jnp.min(jnp.where(matches, size, jnp.arange(size)), axis=1)
        return path_to(tree, first_miss - 1)
    ancestors = unpack_mask(tree.ancestors, size)  # [B, N, N]
    reachable = jnp.all(~ancestors | matches[:, None, :], axis=-1)
    return path_to(tree, jnp.argmax(jnp.where(reachable, tree.depth, -1), axis=1))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Walk down from the root, trying each node's children in order.

    If tokens were drawn (``tree.probs``; chains only), a child x is accepted with probability
    min(1, p(x) / q(x)). After a rejection p becomes norm(max(0, p - q)). For deterministic children
    q is one-hot: x is accepted with probability p(x), and a rejection removes x from p. At
    temperature 0 p is one-hot, and the rule equals Match.
    """

    def proposals(self, is_chain: bool) -> tuple[Proposal, ...]:
        return sound_proposals("rejection", is_chain)

    def accept(self, verified: Verified) -> Accepted:
        if verified.greedy:
            return Match().accept(verified)
        tree, sampling, layout = verified.tree, verified.sampling, verified.layout
        target = probabilities(verified.logits, sampling, layout)  # [B, N, V / shards]
        batch, size, vocab = target.shape
        positions = verified.context_lens[:, None] + tree.depth  # of each node's token
        nodes = jnp.arange(size)[:, None]
        trials = uniform(sampling.seeds, Stream.ACCEPT, positions, nodes)[..., 0]  # [B, N]

        def try_node(node: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            current, p = carry  # [B], [B, V / shards]
            token = tree.tokens[:, node]
            tried = tree.parents[:, node] == current
            if tree.probs is None:
                q = collectives.one_hot(token, vocab, layout).astype(p.dtype)
            else:
                q = tree.probs[:, node]
            q_token = collectives.take(q, token, layout)
            accepted = tried & (trials[:, node] * q_token < collectives.take(p, token, layout))
            p = jnp.where((tried & ~accepted)[:, None], _residual(p, q, layout), p)
            p = jnp.where(accepted[:, None], target[:, node], p)
            return jnp.where(accepted, node, current), p

        start = (jnp.zeros(batch, jnp.int32), target[:, 0])
        leaf, p = jax.lax.fori_loop(1, size, try_node, start)
        path, depth = path_to(tree, leaf)
        bonus = _draw(p, sampling, verified.context_lens + depth + 1, layout)
        after = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, axis=1), axis=1)
        tokens = jnp.where(jnp.arange(path.shape[1]) == depth[:, None], bonus[:, None], after)
        return Accepted(path=path, depth=depth, tokens=tokens)


def _residual(p: Array, q: Array, layout: Layout) -> Array:
    """norm(max(0, p - q)): the distribution to draw from after a rejection; [B, V / shards].

    p itself if nothing is left, which only rounding can cause.
    """
    left = jnp.maximum(p - q, 0.0)
    total = collectives.total(left, layout)[..., None]
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), p)


def _draw(p: Array, sampling: Sampling, positions: Array, layout: Layout) -> Array:
    """Sample from p [B, V / shards] with the noise of Stream.RESIDUAL: int32 [B]."""
    ids = vocab_ids(p.shape[-1], layout)
    scores = perturb(jnp.log(p)[:, None], sampling, positions[:, None], ids, stream=Stream.RESIDUAL)
    return collectives.argmax(scores, layout)[:, 0]


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accept ``mean_length - 1`` drafted tokens per round on average, whatever they are.

    For timing only: the text has no meaning. It costs as much as Match. The accepted depth is drawn
    at random between the two nearest integers.
    """

    mean_length: float

    def proposals(self, is_chain: bool) -> tuple[Proposal, ...]:
        return sound_proposals("match", is_chain)

    def accept(self, verified: Verified) -> Accepted:
        tree, sampled = verified.tree, Match().accept(verified)
        places, seeds = verified.context_lens[:, None], verified.sampling.seeds
        share = uniform(seeds, Stream.ACCEPT, places, jnp.arange(1))[:, 0, 0]
        depth = jnp.floor(self.mean_length - 1 + share).astype(jnp.int32)
        if tree.is_chain:
            leaf = jnp.minimum(depth, tree.num_nodes - 1)
        else:
            leaf = jnp.argmax(jnp.where(tree.depth <= depth[:, None], tree.depth, -1), axis=1)
        path, depth = path_to(tree, leaf)
        return sampled.replace(path=path, depth=depth)


_NAMED: Mapping[str, AcceptanceRule] = MappingProxyType(
    {"match": Match(), "rejection": Rejection()}
)


def acceptance_rule(acceptance: str | Any) -> AcceptanceRule:
    """The rule of a SpeculationConfig.acceptance: a name, or the rule itself."""
    return _NAMED[acceptance] if isinstance(acceptance, str) else acceptance


def checked_outcome(rule: AcceptanceRule, tree: DraftTree, outcome: Any) -> Accepted:
    """What ``accept`` returned for a tree of B rows. Raises ValueError for another type, and for
    arrays of other shapes than Accepted says."""
    name = f"{type(rule).__name__}.accept"
    if not isinstance(outcome, Accepted):
        raise ValueError(f"{name} must return an Accepted, got {type(outcome).__name__}")
    batch, width = tree.tokens.shape[0], tree.max_depth + 1
    wanted = {"path": (batch, width), "depth": (batch,), "tokens": (batch, width)}
    got = {field: jnp.shape(getattr(outcome, field)) for field in wanted}
    problems = [
        f"{field} is {list(got[field])}, not {list(shape)}"
        for field, shape in wanted.items()
        if got[field] != shape
    ]
    if problems:
        raise ValueError(f"{name} must return arrays of its rows and depths: {', '.join(problems)}")
    return outcome
