"""Log-probabilities from what programs emit to what a generation holds."""

from collections.abc import Iterator

import numpy as np

from jaxspec.generation import Generation, TokenLogprob
from jaxspec.state import Emitted


def take_logprobs(generation: Generation, emitted: Emitted, place: int) -> None:
    """Add those of a row, in ``place`` of what one call emitted, as far as they are asked for."""
    sampling = generation.sampling
    if generation.logprobs is not None:
        counts = np.asarray(emitted.counts)[:, place]
        kept = np.arange(emitted.tokens.shape[2]) < counts[:, None]
        arrays = (emitted.tokens, emitted.logprobs, emitted.top_tokens, emitted.top_logprobs)
        own = [np.asarray(x)[:, place][kept] for x in arrays]
        generation.logprobs.extend(_entries(*own, alternatives=sampling.logprobs or 0))
    if sampling.prompt_logprobs is not None and emitted.prompt is not None:
        prompt = emitted.prompt
        kept = np.asarray(prompt.valid)[place]
        arrays = (prompt.logprobs, prompt.top_tokens, prompt.top_logprobs)
        own = [np.asarray(x)[place][kept] for x in arrays]
        known = len(generation.prompt_logprobs or ())
        tokens = np.array(generation.prompt[known : known + len(own[0])], np.int32)
        own = [x[: len(tokens)] for x in own]
        generation.add_prompt_logprobs(
            _entries(tokens, *own, alternatives=sampling.prompt_logprobs)
        )


def _entries(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
    alternatives: int,
) -> Iterator[TokenLogprob]:
    """Of tokens [n], with the first of their alternatives [n, K]."""
    rows = (x.tolist() for x in (tokens, logprobs, top_tokens, top_logprobs))
    for token, logprob, ids, values in zip(*rows, strict=True):
        top = zip(ids[:alternatives], values[:alternatives], strict=True)
        yield TokenLogprob(token, logprob, tuple(top))
