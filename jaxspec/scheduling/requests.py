"""Requests: sampling parameters, and the checks of prompts before anything runs."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

LARGEST_NUMBER = 3e38  # just below float32's largest number


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples.

    Attributes:
      temperature: 0 always takes the likeliest token.
      top_k, top_p, min_p: keep the k likeliest tokens (0: all), the smallest set of mass top_p,
        those at least min_p times as likely as the likeliest; applied in this order.
      seed: in float32 and under the matching rule, equal seeds and prompts give equal texts, in any
        batch and with any drafter. None: the engine gives each request a seed of its own.
      max_tokens: most tokens to generate.
      stop_token_ids: tokens that end the text; None takes the model's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        top_k, seed, stops = self.top_k, self.seed, self.stop_token_ids
        checks = {  # NaN is in no range
            "temperature": (
                _is_number(temperature) and 0 <= temperature <= LARGEST_NUMBER,
                "a finite number, at least 0",
            ),
            "top_k": (
                is_integer(top_k) and 0 <= top_k < 2**31,
                "an integer, at least 0 (0 keeps all tokens)",
            ),
            "top_p": (_is_number(top_p) and 0 < top_p <= 1, "a number in (0, 1]"),
            "min_p": (_is_number(min_p) and 0 <= min_p <= 1, "a number in [0, 1]"),
            "max_tokens": (
                is_integer(self.max_tokens) and self.max_tokens >= 1,
                "an integer, at least 1",
            ),
            "seed": (
                seed is None or (is_integer(seed) and 0 <= seed < 2**32),
                "an integer in [0, 2**32), or None",
            ),
            "stop_token_ids": (
                stops is None or (isinstance(stops, (tuple, list)) and all(map(is_integer, stops))),
                "a tuple of token ids, or None",
            ),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {reprlib.repr(getattr(self, name))}")


def _is_number(value: object) -> bool:
    return is_integer(value) or isinstance(value, (float, np.floating))


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value has an integer type other than bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless it is an integer of at least 1."""
    if not (is_integer(value) and value >= 1):
        raise ValueError(f"{name} must be an integer, at least 1, got {reprlib.repr(value)}")


def with_own_seeds(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """``count`` copies of ``sampling`` with seeds ``sampling.seed + i``; without a seed, ``i``."""
    first = sampling.seed or 0
    return [dataclasses.replace(sampling, seed=(first + index) % 2**32) for index in range(count)]


def check_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    vocab_size: int,
    max_length: int,
    max_position: int,
) -> None:
    """Raise ValueError for prompts that are missing, empty, too long or not of this vocabulary.

    Args:
      max_length: most tokens of a request, the generated ones included.
      max_position: the largest ``max_length`` that the model allows.
    """
    if len(prompts) == 0:
        raise ValueError("no prompts were given")
    if len(prompts) != len(sampling):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling)} sampling params")
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {reprlib.repr(params)}")
        _check_prompt(index, prompt, vocab_size)
        if len(prompt) >= max_length:
            room = f"prompt {index} has {len(prompt)} tokens; with those generated at most "
            if len(prompt) < max_position:
                raise ValueError(
                    f"{room}{max_length} fit: raise max_length, to at most {max_position}"
                )
            raise ValueError(
                f"{room}{max_position} fit this model: shorten the prompt to fewer than that"
            )
        wrong = [token for token in params.stop_token_ids or () if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"stop_token_ids has {wrong[0]}, outside 0..{vocab_size - 1}")


def _check_prompt(index: int, prompt: Sequence[int], vocab_size: int) -> None:
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(
        prompt, (Sequence, np.ndarray)
    ):
        kind = type(prompt).__name__
        raise ValueError(f"prompt {index} must be a list of token ids, not {kind}")
    if len(prompt) == 0:
        raise ValueError(f"prompt {index} is empty: give at least one token")
    for kind in set(map(type, prompt)):
        if issubclass(kind, bool) or not issubclass(kind, (int, np.integer)):
            raise ValueError(
                f"prompt {index} has token ids that are {kind.__name__}: they must be integers"
            )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(f"prompt {index} has a token id outside 0..{vocab_size - 1}")
