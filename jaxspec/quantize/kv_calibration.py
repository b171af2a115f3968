"""Scales of 8-bit caches by what keys and values a model has, and what such caches cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.cache import KVScales, PagedKV
from jaxspec.checkpoints.kv_scale_file import KVScaleFile
from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.evaluation.perplexity import Scores
from jaxspec.llm.llm import LLM
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.kv_cache import has_float8_cache
from pallas_kernels.float8 import LARGEST

MARGIN = 1.25  # margin above the largest entry that was seen; larger ones saturate
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
    llm.generate(list(prompts), with_distinct_seeds(sampling, len(prompts)))
    pool = llm.engine.programs.state.pool
    target, drafter = (
        tuple(_scales(kv, margin) for kv in nodes_of(part, PagedKV))
        for part in (pool.target, pool.draft)
    )
    return KVScaleFile(target, drafter)


def _scales(kv: PagedKV, margin: float) -> KVScales:
    def scale(pages: Any) -> Any:
        entries = np.asarray(pages[1:], np.float32)  # page 0 has padding
        largest = np.abs(entries).max(axis=(0, 2, 3))
        return np.maximum(largest * margin / LARGEST, SMALLEST).astype(np.float32)

    return KVScales(k=scale(kv.k), v=scale(kv.v))


def scores(llm: LLM, rows: Sequence[Sequence[int]]) -> Scores:
    """The scores of each token but the first of every row, read through the cache.

    Raises ValueError if a row could not be read.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    nats = []
    for completion in llm.generate(list(rows), sampling):
        if completion.error or completion.prompt_logprobs is None:
            raise ValueError(f"a row could not be read: {completion.error}")
        entries = completion.prompt_logprobs[1:]
        nats.append(-sum(entry.logprob for entry in entries if entry is not None))
    return Scores(np.array(nats), np.array([len(row) - 1 for row in rows]))
