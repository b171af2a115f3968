"""Pages, memory and compiled programs: what does not fit is split, refused early, or forgotten."""

from typing import Any

import jax
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig
from jaxspec.engine import memory
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams, init_pool
from jaxspec.parallel import make_mesh
from tests.helpers.layouts import on_mesh
from tests.helpers.pool_bytes import pool_bytes
from tests.helpers.programs import traces
from tests.helpers.random_models import make_params

# Memory

CHAIN = SpeculationConfig.chain(2)


def bytes_of(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_the_estimate_is_what_a_pool_takes(drafter: str):
    params = make_params(drafter, CHAIN)
    made = bytes_of(init_pool(params, 9, 8, 4))
    assert pool_bytes(params, 9, 8, 4, together=False) == made > 0


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle3", "draft_model"])
def test_a_token_takes_its_share_of_the_pages(drafter: str):
    params = make_params(drafter, CHAIN)
    more, fewer = (init_pool(params, pages, 8, 4) for pages in (19, 9))
    target, draft = memory.bytes_of_token(params)
    assert target == (bytes_of(more.target) - bytes_of(fewer.target)) / 80 > 0
    assert draft == (bytes_of(more.draft) - bytes_of(fewer.draft)) / 80
    assert (draft > 0) == (drafter in ("eagle3", "draft_model"))


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
    assert pool_bytes(params, 10, 8, 4, together=False) == held
    assert pool_bytes(params, 10, 8, 4, together=True) == 4 * held


def refused(params: EngineParams, cache: CacheConfig) -> str:
    with pytest.raises(ValueError, match="free for them") as caught:
        memory.num_pages(params, cache, 4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pool_beyond_the_memory_is_refused_and_what_fits_is_said(
    monkeypatch: pytest.MonkeyPatch,
):
    params = make_params("eagle3", CHAIN)
    free = pool_bytes(params, 21, 8, 4, together=True) / memory.USABLE
    monkeypatch.setattr(memory, "free_bytes", lambda device: free + 1)
    assert memory.num_pages(params, CacheConfig(8, 64, 20), 4) == 21
    assert "num_pages=20 fits, which is 160 tokens" in refused(params, CacheConfig(8, 64, 21))
    message = refused(params, CacheConfig(1000, 64, 4))
    assert "no page of 1000 tokens fits: page_size must be at most 84" in message
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    assert memory.num_pages(params, CacheConfig(8, 64, 21), 4) == 22


def test_without_a_number_there_are_pages_for_all_rows_or_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    params = make_params("eagle3", CHAIN)
    cache = CacheConfig(8, 64)
    assert memory.num_pages(params, cache, 4) == 1 + 4 * 9  # 64 tokens and a tree of 3 slots
    free = pool_bytes(params, 21, 8, 4, together=True) / memory.USABLE
    monkeypatch.setattr(memory, "free_bytes", lambda device: free + 1)
    assert memory.num_pages(params, cache, 4) == 21
    assert "num_pages=20 fits" in refused(params, CacheConfig(8, 256))


def test_a_page_size_of_a_million_is_an_error_before_anything_is_allocated():
    with pytest.raises(ValueError, match=r"pages of 1000000000000 tokens need .* GB beside"):
        Engine(make_params("ngram", CHAIN), CacheConfig(10**12, 64), EngineConfig(max_rows=4))
    assert (memory.free_bytes(jax.devices()[0]) or 0) > 1 << 20


# Compiled programs


@pytest.mark.slow
def test_programs_are_forgotten_when_they_are_many_or_memory_maps_scarce(
    monkeypatch: pytest.MonkeyPatch,
):
    sampling = SamplingParams(max_tokens=4)
    own = Engine(
        make_params("none", CHAIN), CacheConfig(8, 64), EngineConfig(max_rows=1, max_programs=4)
    )
    programs: list[Any] = [own.programs.admit_rows, own.programs.prefill, own.programs.decode]
    for program in programs:
        program.clear_cache()  # the engines of a process share them

    def run(length: int) -> list[int]:
        generation = own.add([5, 6, 7] * length, sampling)
        own.finish([generation])
        return generation.token_ids

    text = run(1)
    assert sum(map(traces, programs)) == own.programs.compiled == 3
    run(9)  # a longer prompt, a program of its own
    assert sum(map(traces, programs)) == own.programs.compiled == 4
    assert run(1) == text and own.programs.compiled == 4
    monkeypatch.setattr(memory, "USABLE_MAPS", 0.0)
    own.shape = PLAIN
    assert run(1) == text and own.programs.compiled == 4, "nothing new was needed"
    own.add([1] * 50, sampling)
    run(2)
    assert sum(map(traces, programs)) < own.programs.compiled
