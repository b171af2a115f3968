"""Speculative against plain decoding of the same request."""

import dataclasses
import statistics

import jax.numpy as jnp
import numpy as np

from jaxspec.llm import LLM, Completion
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.scheduling.requests import SamplingParams


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Whether the tokens are the same, and medians over alternating runs.

    ``first_difference`` is the index of the first token that differs, None when identical.
    """

    identical: bool
    first_difference: int | None
    speedup: float
    plain_decode_tokens_per_second: float
    speculative_decode_tokens_per_second: float


def compare(
    speculative: LLM, plain: LLM, prompt: str, sampling: SamplingParams, repeats: int = 3
) -> Comparison:
    """Run both engines in turn, after a warm-up of each, and compare tokens and decode speed."""
    rates: dict[LLM, list[float]] = {speculative: [], plain: []}
    tokens: dict[LLM, list[int]] = {}
    for turn in range(repeats + 1):
        for llm, measured in rates.items():
            [completion] = llm.generate([prompt], sampling)
            tokens[llm] = completion.token_ids
            if turn > 0:
                measured.append(decode_rate(completion))
    first, second = tokens[speculative], tokens[plain]
    fast, slow = (statistics.median(rates[llm]) for llm in (speculative, plain))
    differs = first_difference(first, second)
    return Comparison(
        identical=differs is None,
        first_difference=differs,
        speedup=fast / slow if slow else 1.0,
        plain_decode_tokens_per_second=slow,
        speculative_decode_tokens_per_second=fast,
    )


def decode_rate(completion: Completion) -> float:
    """Tokens a second of the decode phase (the first token comes from the prefill)."""
    seconds = completion.timings.decode
    return (len(completion.token_ids) - 1) / seconds if seconds else 0.0


def first_difference(first: list[int], second: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def logit_gap(target: Decoder, first: Completion, second: Completion, index: int) -> float:
    """How far apart the target, read densely, sees the two tokens at the first difference."""
    tokens = np.asarray([first.prompt_token_ids + first.token_ids[:index]], np.int32)
    last = tokens.shape[1] - 1
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 64)))  # few shapes, few compilations
    positions = jnp.arange(padded.shape[1])[None]
    caches = (None,) * len(target.layers)
    hidden, _, _ = decoder.run(target, jnp.asarray(padded), positions, caches, dense_causal_attend)
    logits = np.asarray(decoder.logits(target, hidden[:, last]))[0]
    return float(abs(logits[first.token_ids[index]] - logits[second.token_ids[index]]))
