"""Perplexity of a checkpoint on held-out text, with confidence intervals; one layer at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.evaluation import RESAMPLES, interval
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import rms_norm
from jaxspec.models.layer import Layer
from jaxspec.quantizer.checkpoint import Streamed, layer_kinds
from jaxspec.quantizer.layers import LayerKind, run_layer


@dataclasses.dataclass(frozen=True)
class Scores:
    """Sums over the predicted tokens of each of N sequences.

    Attributes:
      nats: float [N], the negative log-probability of the tokens.
      tokens: int [N], how many they are.
    """

    nats: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Mean nats a token, and the perplexity, its exponential. Intervals are 95 % bootstrap
    intervals over sequences."""

    sequences: int
    tokens: int
    nats: float
    nats_interval: tuple[float, float]
    perplexity: float
    perplexity_interval: tuple[float, float]


def score(
    directory: Path,
    tokens: np.ndarray,
    counted: np.ndarray,
    batch: int,
    report: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score sequences of tokens, int [N, T], by a checkpoint, computing in float32.

    Args:
      counted: bool [N, T], the tokens to predict; a sequence's first never is.
      batch: sequences that a layer runs over at a time.
      report: called with the layers done and their number.

    Raises ValueError for a checkpoint that cannot be read, and if no token is counted.
    """
    counted = counted[:, 1:]
    if not counted.any():
        raise ValueError("no token is left to measure perplexity on: give more text")
    model = Streamed(directory)
    ends, kinds = model.ends(), layer_kinds(model.config)
    rows = [slice(start, start + batch) for start in range(0, len(tokens), batch)]
    states = [np.asarray(decoder.embed(ends, jnp.asarray(tokens[each]))) for each in rows]
    for index, kind in enumerate(kinds):
        layer = model.layer(index)
        states = [np.asarray(_after_layer(layer, each, kind)) for each in states]
        if report is not None:
            report(index + 1, len(kinds))
    nats = [
        np.asarray(_nats(ends, own[:, :-1], tokens[each, 1:], counted[each]))
        for own, each in zip(states, rows, strict=True)
    ]
    return Scores(np.concatenate(nats).astype(np.float64), counted.sum(1))


@functools.partial(jax.jit, static_argnames=("kind",))
def _after_layer(layer: Layer, states: Array, kind: LayerKind) -> Array:
    return run_layer(layer, kind, states)


@jax.jit
def _nats(ends: Decoder, states: Array, targets: Array, counted: Array) -> Array:
    """Sums over the counted targets, [B, T] each, of states [B, T, H] before the last norm."""

    def of_row(row: tuple[Array, Array, Array]) -> Array:
        own, wanted, kept = row
        normed = rms_norm(own, ends.norm, ends.config.rms_norm_eps)
        scores = jax.nn.log_softmax(decoder.logits(ends, normed))
        chosen = jnp.take_along_axis(scores, wanted[:, None], axis=-1)[:, 0]
        return -jnp.sum(jnp.where(kept, chosen, 0.0))

    return lax.map(of_row, (states, targets, counted))


def summarize(scores: Scores) -> Perplexity:
    nats, (low, high) = _mean(scores.nats, scores.tokens)
    return Perplexity(
        sequences=len(scores.nats),
        tokens=int(scores.tokens.sum()),
        nats=nats,
        nats_interval=(low, high),
        perplexity=math.exp(nats),
        perplexity_interval=(math.exp(low), math.exp(high)),
    )


def difference(before: Scores, after: Scores) -> tuple[float, tuple[float, float]]:
    """Mean nats a token by which ``after`` is worse on the same sequences, and its interval.

    It is much narrower than those of both, since what a sequence holds counts in neither.
    """
    return _mean(after.nats - before.nats, after.tokens)


def _mean(sums: np.ndarray, counts: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Sum of sums over sum of counts, and its bootstrap interval over sequences."""
    chosen = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    chosen = chosen[counts[chosen].sum(axis=1) > 0]
    resampled = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    return float(sums.sum() / counts.sum()), interval(resampled)
