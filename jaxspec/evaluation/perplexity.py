"""How well a model predicts text: sums of losses, and the perplexity that they mean."""

import dataclasses
import math

import numpy as np

from jaxspec.evaluation import bootstrap
from jaxspec.evaluation.bootstrap import Interval


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
    nats_interval: Interval
    perplexity: float
    perplexity_interval: Interval


def summarize(scores: Scores) -> Perplexity:
    nats, (low, high) = bootstrap.ratio(scores.nats, scores.tokens)
    return Perplexity(
        sequences=len(scores.nats),
        tokens=int(scores.tokens.sum()),
        nats=nats,
        nats_interval=(low, high),
        perplexity=math.exp(nats),
        perplexity_interval=(math.exp(low), math.exp(high)),
    )


def difference(before: Scores, after: Scores) -> tuple[float, Interval]:
    """Mean nats a token by which ``after`` is worse on the same sequences, and its interval.

    It is much narrower than those of both, since what a sequence holds counts in neither.
    """
    return bootstrap.ratio(after.nats - before.nats, after.tokens)
