"""Comparison of speculative and plain decoding of the same requests: speed and tokens."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.evaluation import bootstrap
from jaxspec.evaluation.acceptance import Acceptance, summarize
from jaxspec.evaluation.bootstrap import Interval
from jaxspec.llm.completion import Completion, decode_seconds, steady_rate
from jaxspec.llm.llm import LLM, Prompt
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import of_whole_sequences


@dataclasses.dataclass(frozen=True)
class RaceResult:
    """The speed of one LLM compared with the first one, the baseline.

    Attributes:
      tokens_per_second: decoding speed, all sequences of a batch together, each while it runs (see
        steady_rate); the median.
      round_ms: time of a round: that of a batch over the rounds of its text that took most; the
        median.
      speedups: speed-up over the baseline for each batch, the median of its turns; ``speedup`` is
        their median, with its 95 % bootstrap interval over batches.
      acceptance: in the texts of each batch's first turn.
      identical: how many of the ``texts`` have the same tokens as the baseline's.
    """

    tokens_per_second: float
    round_ms: float
    speedups: tuple[float, ...]
    speedup: float
    speedup_interval: Interval
    acceptance: Acceptance
    identical: int
    texts: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Tokens and speed of plain and speculative decoding, in alternating pairs of runs.

    Attributes:
      first_difference: index of the first token that differs, None when identical.
      speedups: speed-up of each pair, in order; ``speedup`` is their median.
      plain_decode_tokens_per_second, decode_tokens_per_second: see decode_rate; medians.
    """

    identical: bool
    first_difference: int | None
    speedups: tuple[float, ...]
    speedup: float
    plain_decode_tokens_per_second: float
    decode_tokens_per_second: float


def race(
    engines: Sequence[LLM],
    batches: Sequence[Sequence[Prompt]],
    sampling: SamplingParams,
    turns: int = 1,
) -> list[RaceResult]:
    """Run every batch on every LLM, in so many turns; the first LLM is the baseline.

    Request ``i`` of a batch has seed ``sampling.seed + i``. What runs for the first time is
    compiled meanwhile: see prepare_race.

    Raises ValueError for texts that end with their first token, as no round is timed then.
    """
    laps = _run(engines, batches, sampling, turns)
    return [_result(laps[0], of_engine) for of_engine in laps]


def compare(
    speculative: LLM, plain: LLM, prompt: Prompt, sampling: SamplingParams, pairs: int = 10
) -> Comparison:
    """Run one request ``pairs`` times with plain and then with speculative decoding.

    Raises ValueError for fewer than one pair, and as ``race`` does.
    """
    if pairs < 1:
        raise ValueError(f"a comparison needs at least one pair of runs, not {pairs}")
    engines = plain, speculative
    _run(engines, [[prompt]], sampling)  # compiles
    plain_laps, laps = _run(engines, [[prompt]] * pairs, sampling)
    result = _result(plain_laps, laps)
    differs = first_difference(laps[0][0][0].token_ids, plain_laps[0][0][0].token_ids)
    return Comparison(
        identical=result.identical == result.texts,
        first_difference=differs,
        speedups=result.speedups,
        speedup=result.speedup,
        plain_decode_tokens_per_second=_result(plain_laps, plain_laps).tokens_per_second,
        decode_tokens_per_second=result.tokens_per_second,
    )


Lap = list[Completion]  # a batch
Turns = list[Lap]  # of the same batch


def _run(
    engines: Sequence[LLM],
    batches: Sequence[Sequence[Prompt]],
    sampling: SamplingParams,
    turns: int = 1,
) -> list[list[Turns]]:
    """For each LLM the completions of each batch. In each turn the LLMs follow each other."""
    laps: list[list[Turns]] = [[[] for _ in batches] for _ in engines]
    for index, batch in enumerate(batches):
        params = with_distinct_seeds(sampling, len(batch))
        for _ in range(turns):
            for engine, of_engine in zip(engines, laps, strict=True):
                of_engine[index].append(engine.generate(batch, params))
    return laps


def _result(base: list[Turns], laps: list[Turns]) -> RaceResult:
    rates, base_rates = (
        np.array([list(map(steady_rate, turns)) for turns in each]) for each in (laps, base)
    )  # [N, turns]
    if not (rates.all() and base_rates.all()):
        raise ValueError("a text ended with its first token: there is no decoding to compare")
    ratios = np.median(rates / base_rates, axis=1)
    first, base_first = ([turns[0] for turns in each] for each in (laps, base))
    pairs = list(_pairs(base_first, first))
    speedup, interval = bootstrap.median(ratios)
    return RaceResult(
        tokens_per_second=float(np.median(np.median(rates, axis=1))),
        round_ms=statistics.median(statistics.median(map(_round_ms, turns)) for turns in laps),
        speedups=tuple(ratios.tolist()),
        speedup=speedup,
        speedup_interval=interval,
        acceptance=summarize([completion for lap in first for completion in lap]),
        identical=sum(found.token_ids == other.token_ids for found, other in pairs),
        texts=len(pairs),
    )


def _round_ms(lap: Lap) -> float:
    return 1e3 * decode_seconds(lap) / max(completion.num_rounds for completion in lap)


def _pairs(base: list[Lap], laps: list[Lap]) -> Iterator[tuple[Completion, Completion]]:
    for lap, other in zip(base, laps, strict=True):
        yield from zip(lap, other, strict=True)


def first_difference(first: list[int], second: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    for index, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def logit_gap(target: Decoder, first: Completion, second: Completion, index: int) -> float:
    """The target's logit gap between the two tokens at ``index``, from one pass without a cache."""
    tokens = np.asarray([first.prompt_token_ids + first.token_ids[:index]], np.int32)
    last = tokens.shape[1] - 1
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 64)))  # few lengths, few compilations
    hidden = of_whole_sequences(target, jnp.asarray(padded))
    logits = np.asarray(decoder.logits(target, hidden[:, last]))[0]
    return float(abs(logits[first.token_ids[index]] - logits[second.token_ids[index]]))
