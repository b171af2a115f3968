"""Comparison of speculative and plain decoding of the same requests: speed and tokens."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.engine.warm_up.compile_all import Progress, batch_keys
from jaxspec.engine.warm_up.compile_early import compile_program, compiling_threads
from jaxspec.evaluation import bootstrap
from jaxspec.evaluation.acceptance import Acceptance, summarize
from jaxspec.evaluation.bootstrap import Interval
from jaxspec.llm.completion import Completion, decode_rate, decode_seconds
from jaxspec.llm.llm import LLM, Prompt
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class RaceResult:
    """The speed of one LLM compared with the first one, the baseline.

    Attributes:
      tokens_per_second: decoding speed, all sequences of a batch together; the median.
      round_ms: time of a round: that of a batch over the rounds of its text that took most; the
        median.
      speedups: speed-up over the baseline for each batch; ``speedup`` is their median, with its
        95 % bootstrap interval over batches.
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
    engines: Sequence[LLM], batches: Sequence[Sequence[Prompt]], sampling: SamplingParams
) -> list[RaceResult]:
    """Run every batch on every LLM, after a warm-up; the first LLM is the baseline.

    Request ``i`` of a batch has seed ``sampling.seed + i``. The time of a batch is that of its
    slowest request.

    Raises ValueError for texts that end with their first token, as no round is timed then.
    """
    laps = _run(engines, batches, sampling)
    return [_result(laps[0], of_engine) for of_engine in laps]


def compile_race(
    engines: Sequence[LLM],
    batch: Sequence[Sequence[int]],
    sampling: SamplingParams,
    on_progress: Progress = lambda done, of: None,
) -> None:
    """Compile, side by side, what a race of such batches runs.

    Nothing runs meanwhile: on a GPU, XLA times matrix products while it compiles. What this misses
    is compiled in the warm-up of the race.
    """
    lengths = list(map(len, batch))
    jobs = [
        (programs, key)
        for programs in (engine.engine.programs for engine in engines)
        for key in batch_keys(programs, lengths, sampling)
        if key not in programs.ready
    ]
    with compiling_threads() as pool:
        compiled = pool.map(lambda job: compile_program(*job), jobs)
        for done, _ in enumerate(compiled, 1):
            on_progress(done, len(jobs))


def compare(
    speculative: LLM, plain: LLM, prompt: Prompt, sampling: SamplingParams, pairs: int = 10
) -> Comparison:
    """Run one request ``pairs`` times with plain and then with speculative decoding.

    Raises ValueError for fewer than one pair, and as ``race`` does.
    """
    if pairs < 1:
        raise ValueError(f"a comparison needs at least one pair of runs, not {pairs}")
    plain_laps, laps = _run((plain, speculative), [[prompt]] * pairs, sampling)
    result = _result(plain_laps, laps)
    differs = first_difference(laps[0][0].token_ids, plain_laps[0][0].token_ids)
    return Comparison(
        identical=result.identical == result.texts,
        first_difference=differs,
        speedups=result.speedups,
        speedup=result.speedup,
        plain_decode_tokens_per_second=_result(plain_laps, plain_laps).tokens_per_second,
        decode_tokens_per_second=result.tokens_per_second,
    )


Lap = list[Completion]  # one batch


def _run(
    engines: Sequence[LLM], batches: Sequence[Sequence[Prompt]], sampling: SamplingParams
) -> list[list[Lap]]:
    """The laps of each LLM: the completions of each batch."""
    laps: list[list[Lap]] = [[] for _ in engines]
    for turn, batch in enumerate([batches[0], *batches]):  # the first is the warm-up
        params = with_distinct_seeds(sampling, len(batch))
        for engine, of_engine in zip(engines, laps, strict=True):
            completions = engine.generate(batch, params)
            if turn > 0:
                of_engine.append(completions)
    return laps


def _result(base: list[Lap], laps: list[Lap]) -> RaceResult:
    rates, base_rates = ([decode_rate(lap) for lap in each] for each in (laps, base))
    if not all((*rates, *base_rates)):
        raise ValueError("a text ended with its first token: there is no decoding to compare")
    ratios = [rate / other for rate, other in zip(rates, base_rates, strict=True)]
    pairs = list(_pairs(base, laps))
    speedup, interval = bootstrap.median(np.array(ratios))
    return RaceResult(
        tokens_per_second=statistics.median(rates),
        round_ms=statistics.median(map(_round_ms, laps)),
        speedups=tuple(ratios),
        speedup=speedup,
        speedup_interval=interval,
        acceptance=summarize([completion for lap in laps for completion in lap]),
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
    positions = jnp.arange(padded.shape[1])[None]
    hidden, _, _ = decoder.run(
        target, jnp.asarray(padded), positions, target.no_states(), dense_causal_attend
    )
    logits = np.asarray(decoder.logits(target, hidden[:, last]))[0]
    return float(abs(logits[first.token_ids[index]] - logits[second.token_ids[index]]))
