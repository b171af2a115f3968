"""Scales of 8-bit caches by what keys and values a model has, and what such caches cost."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVScales, PagedKV
from jaxspec.evaluation import bootstrap_interval
from jaxspec.llm import LLM
from jaxspec.quantization.kv_cache import has_float8_cache
from jaxspec.quantization.kv_scales import KVScaleFile
from jaxspec.scheduling.requests import SamplingParams, with_own_seeds
from pallas_kernels.float8 import LARGEST

MARGIN = 1.25  # room above the largest entry that was seen; larger ones saturate
SMALLEST = 1e-6  # a scale, for heads whose entries are all 0
NEW_TOKENS = 16  # generated after each prompt, so that a drafter drafts


def measured_scales(
    llm: LLM, prompts: Sequence[Sequence[int]], margin: float = MARGIN
) -> KVScaleFile:
    """Scales with which the largest key and value of every KV head, times ``margin``, is 448.

    The prompts are read and continued; then the pages of target and drafter are looked at.

    Args:
      llm: on one device, with a cache of the weights' dtype, used for nothing before.

    Raises ValueError for another LLM.
    """
    params = llm.params
    if params.mesh is not None or params.stages or has_float8_cache(params):
        raise ValueError("scales are measured on one device, with kv_dtype None")
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=0)
    llm.generate(list(prompts), with_own_seeds(sampling, len(prompts)))
    pool = llm.engine.programs.state.pool
    target, drafter = (
        tuple(_scales(own, margin) for own in _caches(part)) for part in (pool.target, pool.draft)
    )
    return KVScaleFile(target, drafter)


def _caches(part: Any) -> list[PagedKV]:
    nodes = jax.tree.leaves(part, is_leaf=lambda node: isinstance(node, PagedKV))
    return [node for node in nodes if isinstance(node, PagedKV)]


def _scales(own: PagedKV, margin: float) -> KVScales:
    def scale(pages: Any) -> Any:
        entries = np.asarray(pages[1:], np.float32)  # page 0 has padding
        largest = np.abs(entries).max(axis=(0, 2, 3))
        return np.maximum(largest * margin / LARGEST, SMALLEST).astype(np.float32)

    return KVScales(k=scale(own.k), v=scale(own.v))


def log_probs(llm: LLM, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The log-probability of each token but the first of every row, read through the cache.

    Raises ValueError if a row could not be read.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for completion in llm.generate(list(rows), sampling):
        if completion.error or completion.prompt_logprobs is None:
            raise ValueError(f"a row could not be read: {completion.error}")
        own = completion.prompt_logprobs[1:]
        found.append(np.array([one.logprob for one in own if one is not None]))
    return found


def perplexity(rows: Sequence[np.ndarray]) -> float:
    """Of log-probabilities, as ``log_probs`` gives them."""
    return float(np.exp(-np.concatenate(rows).mean()))


def loss_increase(
    rows: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> tuple[float, tuple[float, float]]:
    """By how much the mean loss of ``others``, in nats a token, is above that of the same ``rows``;
    with a 95 % bootstrap interval over rows."""
    tokens = np.array([len(row) for row in rows])
    pairs = zip(rows, others, strict=True)
    differences = np.array([(row - other).sum() for row, other in pairs])

    def mean(chosen: np.ndarray) -> np.ndarray:
        return differences[chosen].sum(axis=1) / tokens[chosen].sum(axis=1)

    return float(differences.sum() / tokens.sum()), bootstrap_interval(mean, len(rows))
