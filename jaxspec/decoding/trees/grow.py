"""Growing a draft tree level by level with a model, as EAGLE-2 does (arXiv 2406.16858).

Each level runs ``top_k`` beams under the tree mask and proposes ``top_k`` children of each. The
best children, by cumulative log-probability, are the next level's beams. At the end, the best
children of all levels form the tree. With ``top_k`` 1 the tree is a chain.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import Sampling, perturb, probabilities, process_logits, vocab_ids
from jaxspec.decoding.sampling.noise import Stream
from jaxspec.decoding.trees.tree import DraftTree, make_chain, make_tree
from jaxspec.parallel import WHOLE, Layout, collectives
from pallas_kernels.top_k.reference import local_top_k

BEHIND = 8.0  # puts a logit after larger ones with noise, which is never below -4


class Beams(NamedTuple):
    """The beams of one level: the input of a model step.

    *Scratch nodes* are the beams of all levels in order. Their KV is in the slots past the root.
    """

    tokens: Array  # int32 [B, k]
    parents: Array  # int32 [B, k], index of each beam's parent among the previous level's beams
    depth: int | Array  # int32 [] in a loop over levels
    first: int | Array  # index of the level's first scratch node; beam b is scratch node first + b
    ancestors: Array  # uint32 [B, k, words], mask over scratch nodes

    @property
    def nodes(self) -> Array:
        """Indices of the level's scratch nodes: int32 [k]."""
        size = self.tokens.shape[1]
        if isinstance(self.first, int):
            return jnp.arange(self.first, self.first + size)
        return self.first + jnp.arange(size)


class Children(NamedTuple):
    """Proposed children of k beams: tokens and log-probabilities [B, k, c]."""

    tokens: Array
    log_probs: Array


def of_parents(beams: Beams, carry: Any) -> Any:
    """For each beam what its parent has of ``carry``: arrays [B, m, ...] -> [B, k, ...], m beams of
    the level before."""
    row = jnp.arange(len(beams.parents))[:, None]
    return jax.tree.map(lambda x: x[row, beams.parents], carry)


Step = Callable[[Beams, Any], tuple[Array, Any]]  # -> (logits [B, k, W / shards], carry)


class Proposer(NamedTuple):
    """Chooses children from draft logits.

    Attributes:
      options: the shape of the tree and how its tokens are chosen.
      context_lens: [B]; a node of depth d is the token at position context_lens + d.
      layout: how the last dimension of the draft logits is split.
      token_ids: target id of each draft id: [W], or [B, k, W] where rows of logits differ in them;
        None if they are equal.
      target_vocab, target_layout: size of the last dimension of the target logits on this device,
        and how it is split, for the distributions that rejection sampling needs.
    """

    options: RoundOptions
    sampling: Sampling
    context_lens: Array
    layout: Layout
    token_ids: Array | None
    target_vocab: int
    target_layout: Layout

    @property
    def speculation(self) -> SpeculationConfig:
        return self.options.speculation

    def among(self, tokens: Array) -> "Proposer":
        """The same for logits [B, k, W] of a few of the target's tokens, int32 [B, k, W], which are
        whole on every device."""
        return self._replace(token_ids=tokens, layout=WHOLE)

    def children(self, logits: Array, depth: int | Array) -> Children:
        """The ``top_k`` children of each beam, at ``depth``, from logits [B, k, W / shards].

        ``depth`` is an integer, or one for each of k rows of logits: int32 [k].
        """
        index, log_probs = self.best(logits, depth)
        return Children(self.target_ids(index), log_probs)

    @jax.named_scope("sample")
    def best(self, logits: Array, depth: int | Array) -> tuple[Array, Array]:
        """The draft ids of ``children``, int32 [B, k, c], and their log-probabilities."""
        ranked = self._ranked(self._processed(logits), depth)
        values, index = collectives.top_log_probs(
            ranked, self.speculation.top_k, self.layout, self.options.kernels
        )
        # NaN would break the order of scores, by which parents come before their children.
        return index, jnp.where(jnp.isnan(values), -jnp.inf, values)

    @jax.named_scope("sample")
    def ranked(self, logits: Array, depth: int | Array) -> Array | None:
        """Logits as the noise that the target shares ranks them; None: as they are.

        Tokens that top-k, top-p or min-p drop come after all others, the likeliest first: the
        target, or a correction, may keep them.
        """
        if self.options.greedy or self.speculation.resolved_proposal != "coupled":
            return None
        ranked = self._ranked(self._processed(logits), depth)
        temperature = jnp.where(self.sampling.drawn, self.sampling.temperature, 1.0)
        last = logits / temperature[:, None, None] - BEHIND
        return jnp.where(jnp.isneginf(ranked), last, ranked)

    def next_token(self, logits: Array, depth: int | Array) -> tuple[Array, Array | None]:
        """A chain's token at ``depth`` from logits [B, 1, W / shards]: int32 [B, 1].

        The second result is the distribution [B, 1, V / shards] that it was drawn from, or None if
        it was not drawn. Of k depths [k] and logits [B, k, W / shards] there are k tokens.
        """
        index, probs = self.chosen(logits, depth)
        return self.target_ids(index), None if probs is None else self.over_target_vocab(probs)

    @jax.named_scope("sample")
    def chosen(self, logits: Array, depth: int | Array) -> tuple[Array, Array | None]:
        """The draft ids of ``next_token``, int32 [B, k], and what they were drawn from, [B, k,
        W / shards] or None."""
        logits, probs = self._processed(logits), None
        if self.speculation.resolved_proposal == "sampled":
            probs = probabilities(logits, self.sampling, self.layout)
        return collectives.argmax(self._ranked(logits, depth), self.layout), probs

    @jax.named_scope("sample")
    def likely_token(self, logits: Array, depth: int | Array) -> tuple[Array, Array]:
        """The same token as ``next_token``, and its probability: float32 [B, 1]."""
        logits = self._processed(logits)
        index = collectives.argmax(self._ranked(logits, depth), self.layout)
        logit = collectives.take(logits, index, self.layout)
        log_sum = collectives.log_sum_exp(logits, self.layout)
        return self.target_ids(index), jnp.exp(logit - log_sum)

    def _processed(self, logits: Array) -> Array:
        if self.speculation.resolved_proposal == "top_k":
            return logits
        return process_logits(
            logits,
            self.sampling,
            self.layout,
            greedy=self.options.greedy,
            kernels=self.options.kernels,
        )

    def _ranked(self, logits: Array, depth: int | Array) -> Array:
        """Processed logits plus the noise of the proposal, by which tokens are ranked."""
        proposal = self.speculation.resolved_proposal
        if proposal == "top_k":
            return logits
        stream = Stream.DRAFT if proposal == "sampled" else Stream.TARGET
        positions = self.context_lens[:, None] + depth  # of one depth the same for all beams
        ids = self._local_token_ids(logits.shape[-1])
        return perturb(logits, self.sampling, positions, ids, stream, greedy=self.options.greedy)

    def target_ids(self, index: Array) -> Array:
        """The target's ids of draft ids [B, k] or [B, k, c]."""
        if self.token_ids is None:
            return index
        if self.token_ids.ndim == 1:
            return self.token_ids[index]
        flat = index.reshape(*index.shape[:2], -1)
        return jnp.take_along_axis(self.token_ids, flat, axis=2).reshape(index.shape)

    def _local_token_ids(self, size: int) -> Array:
        ids = vocab_ids(size, self.layout)
        if self.token_ids is None:
            return ids
        return self.token_ids[ids] if self.token_ids.ndim == 1 else self.token_ids

    @jax.named_scope("sample")
    def over_target_vocab(self, probs: Array) -> Array:
        """Expand a draft distribution to the target's vocabulary: [B, k, W / shards] ->
        [B, k, V / shards]."""
        if self.layout.vocab:
            probs = jax.lax.all_gather(probs, self.layout.vocab, axis=2, tiled=True)
        ids = jnp.arange(probs.shape[-1]) if self.token_ids is None else self.token_ids
        offset = collectives.shard_offset(self.target_vocab, self.target_layout.vocab)
        # A negative index would wrap around. It is replaced by one past the end, which is dropped.
        local = jnp.where(ids >= offset, ids - offset, self.target_vocab)
        empty = jnp.zeros((*probs.shape[:2], self.target_vocab), probs.dtype)
        if ids.ndim == 1:
            return empty.at[:, :, local].set(probs, mode="drop")
        rows, beams = jnp.ogrid[: probs.shape[0], : probs.shape[1]]
        return empty.at[rows[..., None], beams[..., None], local].set(probs, mode="drop")


def check_top_k(
    shape: TreeShape, count: int, kind: Literal["tokens", "candidates"] = "tokens"
) -> None:
    """Raise ValueError if a node of a tree should get more children than there are draft tokens,
    or candidates for each."""
    if shape.top_k > count:
        among = "the draft vocabulary of" if kind == "tokens" else "this drafter's choice among"
        raise ValueError(
            f"a draft tree of top_k {shape.top_k} is wider than {among} {count} {kind}: choose a "
            "smaller top_k"
        )


def grow(
    proposer: Proposer, roots: Array, root_logits: Array, step: Step, carry: Any
) -> tuple[DraftTree, Any]:
    """Grow a tree below ``roots`` [B].

    Args:
      root_logits: [B, W / shards] draft logits after the root.
      step: runs one level of beams; ``carry`` is what it threads through (caches, hidden states).

    Raises ValueError for a ``top_k`` above the draft vocabulary.
    """
    shards = math.prod(map(jax.lax.axis_size, proposer.layout.vocab))
    check_top_k(proposer.speculation, root_logits.shape[-1] * shards)
    if proposer.speculation.is_chain:
        return _grow_chain(proposer, roots, root_logits, step, carry)
    spec = proposer.speculation
    children = proposer.children(root_logits[:, None], 1)
    beams, scores = _first_beams(children, spec), children.log_probs[:, 0]
    beam_candidates = jnp.broadcast_to(1 + jnp.arange(spec.top_k), scores.shape)
    num_candidates = 1 + spec.top_k  # the root is candidate 0
    candidates = [Candidates(beams.tokens, scores, jnp.zeros_like(beams.tokens))]
    for depth in range(2, spec.max_depth + 1):
        logits, carry = step(beams, carry)
        children = proposer.children(logits, depth)
        totals = children.log_probs + scores[:, :, None]
        parents = jnp.broadcast_to(beam_candidates[:, :, None], totals.shape)
        candidates.append(Candidates(*map(_flatten, (children.tokens, totals, parents))))
        scores, picked = local_top_k(_flatten(totals), spec.top_k)
        beams = _next_beams(beams, children, picked, spec, depth)
        beam_candidates = num_candidates + picked
        num_candidates += spec.top_k**2
    return rerank(roots, candidates, spec), carry


def _grow_chain(
    proposer: Proposer, roots: Array, root_logits: Array, step: Step, carry: Any
) -> tuple[DraftTree, Any]:
    """Does what grow does, with one beam and one child per level, which needs no scores."""
    spec, logits = proposer.speculation, root_logits[:, None]
    tokens, probs = [roots[:, None]], []
    for depth in range(1, spec.max_depth + 1):
        if depth > 1:
            # Each scratch node sees itself and all scratch nodes before it.
            seen = _node_bits(0, depth - 1, _words(spec)).sum(axis=0, dtype=np.uint32)
            ancestors = jnp.broadcast_to(seen, (*tokens[-1].shape, seen.size))
            parents = jnp.zeros_like(tokens[-1])
            beam = Beams(tokens[-1], parents, depth - 1, depth - 2, ancestors)
            logits, carry = step(beam, carry)
        token, drawn_from = proposer.next_token(logits, depth)
        tokens.append(token)
        probs.append(drawn_from)
    return drawn_chain(jnp.concatenate(tokens, axis=1), probs), carry


def drawn_chain(tokens: Array, probs: Sequence[Array | None]) -> DraftTree:
    """The chain of tokens [B, 1 + n], the root first.

    ``probs``: what the others were drawn from, in parts [B, m, V / shards] of m of them each; None:
    they were not drawn.
    """
    drawn = [part for part in probs if part is not None]
    if drawn:  # put together at once: they are large
        drawn = [jnp.zeros_like(drawn[0][:, :1]), *drawn]  # the root was not drawn
    size = np.full(len(tokens), tokens.shape[1])
    return make_chain(tokens, size, jnp.concatenate(drawn, axis=1) if drawn else None)


class Candidates(NamedTuple):
    """Children proposed at one level. Candidates of all levels are numbered; 0 is the root."""

    tokens: Array  # [B, c]
    scores: Array  # [B, c] cumulative log-probability
    parents: Array  # [B, c] candidate index


def _flatten(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _words(spec: SpeculationConfig) -> int:
    """Number of words in a mask over the scratch nodes of all levels."""
    return -(-spec.top_k * spec.max_depth // 32)


def _node_bits(first: int, count: int, words: int) -> np.ndarray:
    """Masks with the bit of each of the scratch nodes first .. first + count - 1: uint32
    [count, words]."""
    node = first + np.arange(count)
    bit = np.uint32(1) << (node % 32).astype(np.uint32)
    return np.where(np.arange(words) == node[:, None] // 32, bit[:, None], np.uint32(0))


def _first_beams(children: Children, spec: SpeculationConfig) -> Beams:
    tokens = children.tokens[:, 0]
    bits = _node_bits(0, spec.top_k, _words(spec))
    ancestors = jnp.broadcast_to(bits, (*tokens.shape, bits.shape[-1]))
    return Beams(tokens, jnp.zeros_like(tokens), 1, 0, ancestors)


def _next_beams(
    beams: Beams, children: Children, picked: Array, spec: SpeculationConfig, depth: int
) -> Beams:
    """The beams of level ``depth``. ``picked`` [B, k]: index of each among the k * k children."""
    parents = picked // spec.top_k
    first = (depth - 1) * spec.top_k
    inherited = jnp.take_along_axis(beams.ancestors, parents[..., None], axis=1)
    return Beams(
        tokens=jnp.take_along_axis(_flatten(children.tokens), picked, axis=1),
        parents=parents,
        depth=depth,
        first=first,
        ancestors=inherited | _node_bits(first, spec.top_k, _words(spec)),
    )


def rerank(roots: Array, candidates: list[Candidates], spec: SpeculationConfig) -> DraftTree:
    """The tree of the best candidates, in order.

    A parent scores no less than its children and comes before them, so the parents of all chosen
    candidates are chosen too.
    """
    tokens, scores, parents = (
        jnp.concatenate(levels, axis=1) for levels in zip(*candidates, strict=True)
    )
    keep = min(spec.num_nodes - 1, tokens.shape[1])
    _, best = local_top_k(scores, keep)
    best = jnp.sort(best, axis=1)
    # The node index of a candidate is the number of kept candidates before it, plus 1 for the root.
    wanted = jnp.take_along_axis(parents, best, axis=1)  # candidate index, 0 the root
    node = jnp.sum(best[:, None, :] + 1 < wanted[:, :, None], axis=-1) + 1
    node_parents = jnp.where(wanted == 0, 0, node)
    batch = roots.shape[0]
    all_tokens = jnp.concatenate([roots[:, None], jnp.take_along_axis(tokens, best, 1)], axis=1)
    all_parents = jnp.concatenate([jnp.full((batch, 1), -1), node_parents], axis=1)
    return make_tree(all_tokens, all_parents, jnp.full(batch, keep + 1), spec.max_depth)
