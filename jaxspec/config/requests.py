"""The checks of requests before anything runs."""

import itertools
import reprlib
from collections.abc import Sequence

import numpy as np

from jaxspec.config.sampling_params import SamplingParams


def check_is_sampling(params: object) -> None:
    """Raise ValueError for what is no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams, got {reprlib.repr(params)}")


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
        check_is_sampling(params)
        _check_prompt(index, prompt, vocab_size)
        if len(prompt) >= max_length:
            problem = f"prompt {index} has {len(prompt)} tokens; with those generated at most "
            if len(prompt) < max_position:
                raise ValueError(
                    f"{problem}{max_length} fit: raise max_length, to at most {max_position}"
                )
            raise ValueError(
                f"{problem}{max_position} fit this model: shorten the prompt to fewer than that"
            )
        _check_token_ids(params, vocab_size)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    budget = params.reasoning_budget
    lists = {
        "stop_token_ids": params.stop_token_ids,
        "further_stop_token_ids": params.further_stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_token_ids": params.bad_token_ids,
        "bad_sequences": tuple(itertools.chain(*params.bad_sequences)),
        "logit_bias": tuple(dict(params.logit_bias)),
        "reasoning_budget": () if budget is None else (*budget.begin, *budget.end),
    }
    for name, ids in lists.items():
        wrong = [token for token in ids or () if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]}, outside 0..{vocab_size - 1}")
    if len(set(params.bad_token_ids)) == vocab_size:
        raise ValueError("bad_token_ids must leave a token, it has the whole vocabulary")


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
