"""What a user asks for, checked before anything runs."""

import dataclasses
from collections.abc import Sequence


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
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


def with_own_seeds(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """``count`` requests that sample alike but for their seeds: ``sampling.seed + i``, from 0 on
    where it has none."""
    first = sampling.seed or 0
    return [dataclasses.replace(sampling, seed=(first + index) % 2**32) for index in range(count)]


def check_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    vocab_size: int,
    max_length: int,
) -> None:
    """Raise ValueError for prompts that are missing, empty, too long or not of this vocabulary."""
    if not prompts:
        raise ValueError("no prompts were given")
    if len(prompts) != len(sampling):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling)} sampling params")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty: give at least one token")
        if len(prompt) >= max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and the cache holds {max_length}, the "
                "generated ones included: raise max_length"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt {index} has a token id outside 0..{vocab_size - 1}")
