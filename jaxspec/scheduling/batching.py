"""A batch of requests as arrays of bucketed shapes.

Rows, length and prompt chunk are rounded up to powers of two, so that similar batches share one
compiled program.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.config import CacheConfig
from jaxspec.scheduling.requests import SamplingParams

SMALLEST_LENGTH = 256
SMALLEST_CHUNK = 16
LARGEST_CHUNK = 512
MOST_STOPS = 4  # stop tokens that every program has room for


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A batch and its padding rows, which stay empty.

    Attributes:
      num_rows: rows of the batch, padding included.
      length: no sequence is longer.
      chunk: prompt tokens read in a call.
      data_parallel: devices that the rows are split over, in equal shares.
      max_lens: [requests] most tokens of each, prompt included.
      stop_token_ids: [requests, E], padded with -1.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    num_rows: int
    length: int
    chunk: int
    max_lens: np.ndarray
    stop_token_ids: np.ndarray
    data_parallel: int = 1

    @property
    def greedy(self) -> bool:
        """Whether no request samples."""
        return all(params.temperature == 0 for params in self.sampling)

    @property
    def num_chunks(self) -> int:
        """Calls that read the longest prompt."""
        return -(-max(map(len, self.prompts)) // self.chunk)

    def chunk_rows(self, index: int) -> np.ndarray | None:
        """Rows that are still reading in chunk ``index``: int32 [B].

        Equally many for each device, padded with ``num_rows`` to a power of two. None: all rows,
        because more than half are reading.
        """
        share = self.num_rows // self.data_parallel
        lists: list[list[int]] = [[] for _ in range(self.data_parallel)]
        for row, prompt in enumerate(self.prompts):
            if len(prompt) > index * self.chunk:
                lists[row // share].append(row)
        width = _power_of_two(max(map(len, lists)))
        if 2 * width > share:
            return None
        padded = [rows + [self.num_rows] * (width - len(rows)) for rows in lists]
        return np.array(padded, np.int32).ravel()

    @property
    def rows(self) -> np.ndarray:
        """Rows of the requests, padded with ``num_rows``, an invalid index: int32 [num_rows]."""
        rows = np.arange(self.num_rows, dtype=np.int32)
        return np.where(rows < len(self.prompts), rows, self.num_rows)

    def values(self, name: str, dtype: type = np.float32) -> np.ndarray:
        """A sampling parameter of every row: [num_rows]."""
        return self._padded(np.array([getattr(p, name) for p in self.sampling], dtype))

    def padded_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [num_rows, length] and how many of them are real [num_rows], int32."""
        tokens = np.zeros((self.num_rows, self.length), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        return tokens, self._padded(lengths)

    def padded_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """``max_lens`` [num_rows] and ``stop_token_ids`` [num_rows, E]."""
        return self._padded(self.max_lens), self._padded(self.stop_token_ids)

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """The values with the last one repeated up to ``num_rows``."""
        missing = self.num_rows - len(values)
        return np.concatenate([values, np.repeat(values[-1:], missing, axis=0)])


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
      data_parallel: the rows become a multiple of it.

    Raises ValueError if the batch and its trees need more pages than the cache has (see
    split_requests).
    """
    num_rows = rows_for(len(prompts), data_parallel)
    limits = _limits(prompts, sampling, cache)
    room = _room(num_rows, scratch_slots, cache)
    if max(limits) > room:
        raise ValueError(
            f"{_needs(num_rows, max(limits), scratch_slots, cache)}: give fewer requests, shorten "
            "them, shrink the tree, or raise num_pages"
        )
    length = min(max(_power_of_two(max(limits)), SMALLEST_LENGTH), room)
    longest = max(len(prompt) for prompt in prompts)
    chunk = min(max(_power_of_two(longest), SMALLEST_CHUNK), LARGEST_CHUNK, length)
    stops = [params.stops(model_stops) for params in sampling]
    width = max(MOST_STOPS, *(_power_of_two(len(ids)) for ids in stops))
    return BatchPlan(
        prompts=tuple(map(tuple, prompts)),
        sampling=tuple(sampling),
        num_rows=num_rows,
        length=length,
        chunk=chunk,
        max_lens=np.array(limits, np.int32),
        stop_token_ids=np.array([[*ids, *[-1] * (width - len(ids))] for ids in stops], np.int32),
        data_parallel=data_parallel,
    )


def rows_for(requests: int, data_parallel: int) -> int:
    """Rows that a number of requests run in."""
    return data_parallel * _power_of_two(-(-requests // data_parallel))


def split_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    cache: CacheConfig,
    *,
    max_rows: int,
    scratch_slots: int,
    data_parallel: int = 1,
) -> list[slice]:
    """Checked requests as batches in order: as many together as rows and pages allow.

    Raises ValueError for a request that has too few pages alone.
    """
    limits = _limits(prompts, sampling, cache)
    for index, limit in enumerate(limits):
        if limit > _room(data_parallel, scratch_slots, cache):
            raise ValueError(
                f"request {index}: {_needs(data_parallel, limit, scratch_slots, cache)}: shorten "
                "the prompt or max_tokens, shrink the tree, or raise num_pages"
            )
    batches, start = [], 0
    for end in range(1, len(limits) + 1):
        rows = rows_for(end + 1 - start, data_parallel)
        if (
            end == len(limits)
            or end - start == max_rows
            or max(limits[start : end + 1]) > _room(rows, scratch_slots, cache)
        ):
            batches.append(slice(start, end))
            start = end
    return batches


def _limits(
    prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], cache: CacheConfig
) -> list[int]:
    """Most tokens of each request, prompt included."""
    return [
        min(len(prompt) + int(params.max_tokens), cache.max_length)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]


def _room(num_rows: int, scratch_slots: int, cache: CacheConfig) -> int:
    """Most tokens of a row that fit the pages, beside the tree's slots past its end."""
    if cache.num_pages is None:
        return cache.max_length
    held = cache.num_pages // num_rows * cache.page_size
    return min(cache.max_length, held - scratch_slots)


def _needs(num_rows: int, length: int, scratch_slots: int, cache: CacheConfig) -> str:
    pages = num_rows * -(-(length + scratch_slots) // cache.page_size)
    return (
        f"{num_rows} rows of {length} tokens and a tree of {scratch_slots} slots need {pages} "
        f"pages of {cache.page_size}, the budget is num_pages={cache.num_pages}"
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
