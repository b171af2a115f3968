"""A batch of requests as arrays of bucketed shapes.

Batch, length and prompt chunk are rounded up to powers of two, so that similar batches share one
compiled program.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.config import CacheConfig
from jaxspec.scheduling.requests import SamplingParams

SMALLEST_LENGTH = 256
SMALLEST_CHUNK = 16
LARGEST_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A batch and its padding rows, which repeat the last request and are given no tokens.

    ``max_lens`` [B] counts prompt and generated tokens, ``stop_token_ids`` [B, E] is padded with
    -1, and no sequence is longer than ``length``.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    batch: int
    length: int
    chunk: int
    max_lens: np.ndarray
    stop_token_ids: np.ndarray

    def values(self, name: str, dtype: type = np.float32) -> np.ndarray:
        """A sampling parameter of every row: [B]."""
        return _padded([getattr(params, name) for params in self.sampling], self.batch, dtype)

    def prompt_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The prompts piece by piece: tokens [B, T] and how many of them are real [B], int32."""
        lengths = np.zeros(self.batch, np.int32)
        lengths[: len(self.prompts)] = [len(prompt) for prompt in self.prompts]
        for start in range(0, int(lengths.max()), self.chunk):
            tokens = np.zeros((self.batch, self.chunk), np.int32)
            for row, prompt in enumerate(self.prompts):
                piece = prompt[start : start + self.chunk]
                tokens[row, : len(piece)] = piece
            yield tokens, np.clip(lengths - start, 0, self.chunk).astype(np.int32)


def plan_batch(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    cache: CacheConfig,
    *,
    model_stops: tuple[int, ...],
    scratch_slots: int,
    data_parallel: int = 1,
) -> BatchPlan:
    """Plan checked requests.

    Args:
      model_stops: stop tokens of requests that name none.
      scratch_slots: slots that a draft tree needs past a sequence's end.
      data_parallel: the batch becomes a multiple of it.

    Raises ValueError if the batch and its trees need more pages than the cache has.
    """
    batch = data_parallel * _power_of_two(-(-len(prompts) // data_parallel))
    limits = [
        min(len(prompt) + params.max_tokens, cache.max_length)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    length = min(max(_power_of_two(max(limits)), SMALLEST_LENGTH), cache.max_length)
    longest = max(len(prompt) for prompt in prompts)
    chunk = min(max(_power_of_two(longest), SMALLEST_CHUNK), LARGEST_CHUNK, cache.max_length)
    _check_pages(batch, length, scratch_slots, cache)
    stops = [model_stops if p.stop_token_ids is None else p.stop_token_ids for p in sampling]
    width = max(1, *(len(ids) for ids in stops))
    rows = [[*ids, *[-1] * (width - len(ids))] for ids in stops]
    return BatchPlan(
        prompts=tuple(map(tuple, prompts)),
        sampling=tuple(sampling),
        batch=batch,
        length=length,
        chunk=chunk,
        max_lens=_padded(limits, batch, np.int32),
        stop_token_ids=_padded(rows, batch, np.int32),
    )


def _check_pages(batch: int, length: int, scratch_slots: int, cache: CacheConfig) -> None:
    pages = -(-(length + scratch_slots) // cache.page_size)
    if cache.num_pages is not None and batch * pages > cache.num_pages:
        raise ValueError(
            f"{batch} sequences of {length} tokens and a tree of {scratch_slots} slots need "
            f"{batch * pages} pages of {cache.page_size}, the budget is {cache.num_pages}: shrink "
            "the tree, the length or the batch, or raise num_pages"
        )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _padded(values: Sequence[object], batch: int, dtype: type) -> np.ndarray:
    """The values as an array of ``batch`` rows, the last one repeated."""
    array = np.asarray(values, dtype)
    return np.concatenate([array, np.repeat(array[-1:], batch - len(array), axis=0)])
