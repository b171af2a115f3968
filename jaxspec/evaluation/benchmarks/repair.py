"""Rollouts in flight as a policy's weights change: how they go on, and how far the change is."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.weights.in_flight import InFlight
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import forward


class Divergence(NamedTuple):
    """How far one policy is from another, as the mean over generated tokens."""

    kl: float  # nats, of the old policy from the new one
    tv: float  # total variation, 0 to 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How requests ended that were under way as the weights changed.

    Attributes:
      seconds: from the change to the last token.
      places: of these requests among all; the others had ended before.
      rounds: of each of them, after the change.
      kept: tokens of each that it kept of its old text.
      written: how many tokens each had as the weights changed.
      texts: new tokens of each.
    """

    seconds: float
    places: list[int]
    rounds: list[int]
    kept: list[int]
    written: list[int]
    texts: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Requests of an engine, each with its seed, that are under way as the weights change.

    Attributes:
      written: tokens that they have then, in the mean.
    """

    engine: Engine
    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    written: int

    def texts(self, target: Decoder) -> list[list[int]]:
        """What they write under these weights."""
        self.engine.use_target(target)
        self.engine.finish(generations := self._start())
        return [each.token_ids for each in generations]

    def change(self, old: Decoder, new: Decoder, in_flight: InFlight) -> Outcome:
        """Change the weights under way. With equal weights nothing changes."""
        self.engine.use_target(old)
        everyone = self._start()
        while sum(len(each.token_ids) for each in everyone) < self.written * len(everyone):
            self.engine.step(1)
        running = [each for each in everyone if not each.done]
        rounds = {each.request_id: each.statistics.rounds for each in running}
        written = {each.request_id: len(each.token_ids) for each in running}
        started = time.perf_counter()
        if new is not old:
            self.engine.use_target(new, in_flight=in_flight)
            running = [each for each in running if each.restarts]  # others ended meanwhile
            rounds = dict.fromkeys(rounds, 0)  # they are counted from the prompt on
        self.engine.finish(everyone)
        return Outcome(
            seconds=time.perf_counter() - started,
            places=[everyone.index(each) for each in running],
            rounds=[each.statistics.rounds - rounds[each.request_id] for each in running],
            kept=[each.kept_tokens for each in running],
            written=[written[each.request_id] for each in running],
            texts=[each.token_ids for each in running],
        )

    def _start(self) -> list[Generation]:
        return self.engine.add_all(self.prompts, self.sampling)


@jax.jit
def moved(target: Decoder, gradient: Decoder, size: float) -> Decoder:
    """The weights after a step of relative norm ``size`` against the gradient: |dW| = size |W|."""

    def norm(tree: Decoder) -> Array:
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
        return jnp.sqrt(sum(squares))

    rate = size * norm(target) / norm(gradient)
    return jax.tree.map(lambda x, g: (x - rate * g).astype(x.dtype), target, gradient)


def divergence(
    old: Decoder, new: Decoder, tokens: Array, lengths: Array, written: Array, temperature: float
) -> Divergence:
    """The divergence of policies that sample with this temperature, over written tokens of texts.

    Args:
      tokens: int32 [B, T], padded on the right; ``lengths``: int32 [B].
      written: bool [B, T], the tokens that count.
    """
    sums = sum(
        np.asarray(_row_divergence(old, new, row[None], length[None], mask[None], temperature))
        for row, length, mask in zip(tokens, lengths, written, strict=True)
    )
    kl, tv = sums / np.asarray(written).sum()
    return Divergence(float(kl), float(tv))


@jax.jit
def _row_divergence(
    old: Decoder, new: Decoder, tokens: Array, lengths: Array, written: Array, temperature: Array
) -> Array:
    """Sums of KL and TV of a row [1, T], over its written tokens."""
    p, q = (
        jax.nn.log_softmax(forward(each, tokens, lengths) / temperature)[:, :-1]
        for each in (old, new)
    )
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    tv = 0.5 * jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1)
    return jnp.stack([jnp.sum(x * written[:, 1:]) for x in (kl, tv)])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


def facts_of(outcome: Outcome, expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """An outcome's figures; texts that are not the ``expected`` ones, of all requests, are
    counted."""
    pairs = zip(outcome.texts, outcome.places, strict=True)
    return {
        "seconds": outcome.seconds,
        "requests": len(outcome.places),
        "mean_rounds": float(np.mean(outcome.rounds)),
        "most_rounds": max(outcome.rounds),
        "kept": float(np.mean(outcome.kept)),
        "wrong_texts": sum(text != expected[place] for text, place in pairs),
    }
