"""Limits on pages, memory and compiled programs: batches are split, or refused early."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import memory
from jaxspec.batch_run import Run
from jaxspec.config.cache import CacheConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams, init_pool
from jaxspec.scheduling.batching import plan_batch, rows_for, split_requests
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.sharding import make_mesh
from tests.layouts import on_mesh
from tests.programs import traces
from tests.random_models import make_params

SCRATCH = 6


def split(lengths: list[int], num_pages: int | None, max_rows: int = 8, shards: int = 1):
    """Batches of requests of one prompt token each, with so many tokens in all; pages of 16."""
    cache = CacheConfig(page_size=16, max_length=512, num_pages=num_pages)
    sampling = [SamplingParams(max_tokens=length - 1) for length in lengths]
    prompts = [[1]] * len(lengths)
    slots = {"scratch_slots": SCRATCH, "data_parallel": shards}
    batches = split_requests(prompts, sampling, cache, max_rows=max_rows, **slots)
    for batch in batches:  # each of them can be planned
        plan = plan_batch(prompts[batch], sampling[batch], cache, model_stops=(), **slots)
        pages = -(-(plan.length + SCRATCH) // cache.page_size)
        assert num_pages is None or plan.num_rows * pages <= num_pages
        assert plan.chunk <= plan.length and max(plan.max_lens) <= plan.length
    assert [row for batch in batches for row in range(batch.start, batch.stop)] == list(
        range(len(lengths))
    )
    return [batch.stop - batch.start for batch in batches]


def test_batches_are_as_large_as_the_pages_allow():
    assert split([90] * 5, None) == [5]
    assert split([90] * 5, None, max_rows=2) == [2, 2, 1]
    assert split([90] * 5, num_pages=24) == [4, 1], "6 pages a row, and five requests take 8 rows"
    assert split([90] * 5, num_pages=23) == [2, 2, 1]
    assert split([90] * 5, num_pages=6) == [1] * 5
    assert split([90, 90, 300, 10, 10], num_pages=24) == [2, 1, 2]
    assert split([90] * 5, num_pages=24, shards=2) == [4, 1]


def test_every_request_that_fits_alone_is_served():
    rng = np.random.default_rng(0)
    for _ in range(200):
        pages = int(rng.integers(2, 60))
        most = min(512, pages * 16 - SCRATCH)
        lengths = rng.integers(2, most + 1, size=rng.integers(1, 20)).tolist()
        sizes = split(lengths, pages)
        assert max(sizes) <= 8
        for size, start in zip(sizes, itertools.accumulate([0, *sizes]), strict=False):
            rest = lengths[start : start + size + 1]  # with one more it would not have fitted
            room = pages // rows_for(len(rest), 1) * 16 - SCRATCH
            assert size == 8 or len(rest) == size or max(rest) > room


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    message = (
        r"request 1: 1 rows of 91 tokens and a tree of 6 slots need 7 pages of 16, the budget is "
        r"num_pages=6: shorten"
    )
    with pytest.raises(ValueError, match=message):
        split([90, 91], num_pages=6)
    with pytest.raises(ValueError, match="need 12 pages of 16, the budget is num_pages=11"):
        split([90], num_pages=11, shards=2)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        split([90], num_pages=0)


# Memory

CHAIN = SpeculationConfig.chain(2)


def bytes_of(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_the_estimate_is_what_a_pool_takes(drafter: str):
    params = make_params(drafter, CHAIN)
    made = bytes_of(init_pool(params, 9, 8, 4))
    assert memory.pool_bytes(params, 9, 8, 4, together=False) == made > 0


def test_the_estimate_knows_what_each_device_holds():
    params = on_mesh(make_params("eagle3", CHAIN), make_mesh(2, 2))
    pool = init_pool(params, 10, 8, 4)
    device = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(pool)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    assert memory.pool_bytes(params, 10, 8, 4, together=False) == held
    assert memory.pool_bytes(params, 10, 8, 4, together=True) == 4 * held


def refused(params: EngineParams, num_pages: int, page_size: int) -> str:
    with pytest.raises(ValueError, match="free for them") as caught:
        memory.check_pool(params, num_pages, page_size, 4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pool_beyond_the_memory_is_refused_and_what_fits_is_said(
    monkeypatch: pytest.MonkeyPatch,
):
    params = make_params("eagle3", CHAIN)
    free = memory.pool_bytes(params, 21, 8, 4, together=True) / memory.USABLE
    monkeypatch.setattr(memory, "free_bytes", lambda device: free + 1)
    memory.check_pool(params, 21, 8, 4)
    assert "num_pages=20 fits, which is 160 tokens" in refused(params, 22, 8)
    assert "no page of 1000 tokens fits: page_size must be at most 84" in refused(params, 5, 1000)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.check_pool(params, 22, 8, 4)


def test_a_page_size_of_a_million_is_an_error_before_anything_is_allocated():
    engine = Engine(make_params("ngram", CHAIN), CacheConfig(10**12, 64), max_rows=4)
    with pytest.raises(ValueError, match=r"pages of 1000000000000 tokens need .* GB beside"):
        Run(engine, [[1, 2, 3]], [SamplingParams()])
    assert (memory.free_bytes(jax.devices()[0]) or 0) > 1 << 20


# Compiled programs


@pytest.mark.slow
def test_the_programs_of_a_long_life_are_bounded_and_the_texts_are_the_same():
    params, sampling = make_params("none", CHAIN), SamplingParams(max_tokens=4)
    cache = CacheConfig(page_size=8, max_length=64, num_pages=64)
    engine = Engine(params, cache, max_rows=2, max_programs=3)
    programs: tuple[Any, ...] = engine.admit, engine.prefill, engine.decode
    for program in programs:
        program.clear_cache()  # the engines of a process share them
    texts = []
    for count in (1, 2, 1):  # three programs each
        texts.append([[] for _ in range(count)])
        run = Run(engine, [[5, 6, 7]] * count, [sampling] * count)
        for progress in run:
            for text, new in zip(texts[-1], progress.new_tokens, strict=True):
                text += new
            assert sum(map(traces, programs)) <= 3
    assert len(texts[0][0]) == 4
    assert texts == [texts[0], 2 * texts[0], texts[0]]


def test_programs_are_forgotten_when_they_are_many_or_memory_maps_scarce(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = Engine(make_params("none", CHAIN), CacheConfig(8, 64), max_programs=3)
    engine.admit = jax.jit(lambda x: x + 1)

    def forgets(count: int, *, others: int) -> bool:
        engine.admit(1.0)
        engine._ready = {("other", index) for index in range(others)}
        new = {("new", index) for index in range(count)}
        assert engine._make_room({*new, *engine._ready}) == new
        forgotten = traces(engine.admit) == 0
        assert (engine._ready == new) == forgotten and new <= engine._ready
        assert engine._make_room(new) == set() and traces(engine.admit) == 1 - forgotten
        return forgotten

    assert not forgets(2, others=1)
    assert forgets(2, others=2) and forgets(1, others=3)
    monkeypatch.setattr(memory, "USABLE_MAPS", 0.0)
    assert forgets(1, others=1)
