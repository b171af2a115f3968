"""Checks of prompts before the weights are loaded."""

from collections.abc import Sequence
from pathlib import Path

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.config.requests import check_is_sampling, check_requests
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.llm.request_length import allowed_length
from jaxspec.llm.tokenizer.prompts import Prompt
from jaxspec.llm.tokenizer.text import TextTokenizer, open_tokenizer, tokenize
from jaxspec.models.from_config.model import load_model_config


def check_prompts(
    model: str | Path,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    max_length: int | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[list[int]]:
    """The token ids of the prompts, after the checks of LLM and its generate.

    Only the model's config and tokenizer are read, so a bad prompt is found before the weights are
    loaded. ``tokenizer`` is the model's, if it has been read already.

    Raises the ValueErrors that LLM and generate would raise.
    """
    directory = resolve_directory(model)
    config = load_model_config(directory)
    length = allowed_length(max_length, config)
    tokens = tokenize(tokenizer or open_tokenizer(directory), prompts)
    params = for_each(sampling, len(tokens))
    check_requests(tokens, params, config.vocab_size, length, config.max_position)
    return tokens


def for_each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """Sampling of each prompt. Raises ValueError for what is none."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    check_sampling(sampling)
    return list(sampling)


def check_sampling(sampling: object) -> None:
    """Raise ValueError for what is no list of SamplingParams."""
    if not isinstance(sampling, (list, tuple)):
        kind = type(sampling).__name__
        raise ValueError(f"sampling must be SamplingParams, or a list of them, not {kind}")
    for params in sampling:
        check_is_sampling(params)
