"""Programs that other threads compile are those that run: none is compiled twice."""

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import ReadKey, RoundsKey
from jaxspec.engine.warm_up import compile_early
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.engine.warm_up.compile_early import compiling_threads
from jaxspec.engine.warm_up.compile_general import general_keys
from jaxspec.engine.warm_up.short_requests import (
    PROMPT_TOKENS,
    SHORT,
    begin_short_requests,
    short_keys,
)
from tests.helpers.compilations import Compilations
from tests.helpers.random_models import make_params


def new_engine(max_length: int) -> Engine:
    """``max_length`` of its own: engines of a process share compiled programs."""
    cache, config = CacheConfig(page_size=4, max_length=max_length), EngineConfig(max_rows=1)
    return Engine(make_params("ngram", SpeculationConfig.chain(1)), cache, config)


def test_the_first_programs_are_compiled_once_beside_this_thread(compilations: Compilations):
    own = new_engine(max_length=52)
    compilations.clear()  # the state's
    generation = own.add([1, 2, 3], SamplingParams(max_tokens=2))
    own.finish([generation])
    here = {name: thread is threading.current_thread() for name, thread in compilations}
    assert here == {"jit(admit)": False, "jit(read_rows)": False, "jit(decode_rows)": True}
    assert len(compilations) == 3
    assert own.programs.compiled == 3 and not own.programs.coming
    assert generation.timings is not None and generation.timings.compile > 0.1


def test_nothing_is_begun_twice_while_long_prompts_are_read(monkeypatch: pytest.MonkeyPatch):
    cache, config = (
        CacheConfig(page_size=4, max_length=64),
        EngineConfig(max_rows=2, prefill_budget=16),
    )
    own = Engine(make_params("ngram", SpeculationConfig.chain(1)), cache, config)
    lowered = noted_programs(own, monkeypatch)
    own.finish([own.add([i] * 40, SamplingParams(max_tokens=2)) for i in range(2)])
    programs = own.programs
    assert lowered == [programs.admit_rows, programs.prefill, programs.decode]
    assert not programs.coming


def noted_programs(own: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are lowered for threads to compile from now on."""
    programs, lowered = own.programs, []
    by_key = {ReadKey: programs.prefill, RoundsKey: programs.decode, int: programs.admit_rows}

    def noting(lower: Callable[..., Any]) -> Callable[..., Any]:
        def run(of: Any, key: Any, *arguments: Any) -> Any:
            lowered.append(by_key[type(key)])
            return lower(of, key, *arguments)

        return run

    for name in ("_lowered", "_lowered_admission"):
        monkeypatch.setattr(compile_early, name, noting(getattr(compile_early, name)))
    return lowered


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_ahead_is_compiled_when_it_runs(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
):
    own = new_engine(max_length=56)
    compile_program = jax.stages.Lowered.compile

    def fail_elsewhere(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not here")
        return compile_program(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail_elsewhere)
    compilations.clear()
    generation = own.add([1, 2, 3], SamplingParams(max_tokens=1))
    own.finish([generation])
    assert len(generation.token_ids) == 1
    here = threading.current_thread()
    assert compilations == [("jit(admit)", here), ("jit(read_rows)", here)]


@pytest.mark.slow
def test_warm_up_compiles_each_program_once(compilations: Compilations):
    own = new_engine(max_length=60)
    compilations.clear()
    own.warm_up([SamplingParams()], tokens=20)
    counts = collections.Counter(name for name, _ in compilations)
    assert counts["jit(read_rows)"] == sum(isinstance(key, ReadKey) for key in own.programs.ready)
    assert counts["jit(decode_rows)"] == 1


def test_a_server_begins_with_few_programs():
    cache, config = CacheConfig(page_size=4, max_length=64), EngineConfig(max_rows=8)
    own = Engine(make_params("ngram", SpeculationConfig.chain(1)), cache, config)
    keys = short_keys(own, 8)
    assert [(type(key), key.rows) for key in keys if isinstance(key, ReadKey)] == [
        (ReadKey, 1),
        (ReadKey, 8),
    ]
    assert len(keys) <= 4 and len(general_keys(own)) == 3


@pytest.mark.slow  # the test above has the keys
def test_short_requests_run_what_was_begun_for_them(monkeypatch: pytest.MonkeyPatch):
    cache = CacheConfig(page_size=4, max_length=64)
    own = Engine(make_params("ngram", SpeculationConfig.chain(1)), cache, EngineConfig(max_rows=2))
    lowered = noted_programs(own, monkeypatch)
    with compiling_threads() as pool:
        begin_short_requests(own, 2, pool)
    begun = set(own.programs.coming)
    for count in (1, 2):
        compile_by_running(own, count, PROMPT_TOKENS, SHORT)
    large = {key for key in own.programs.ready if isinstance(key, ReadKey | RoundsKey)}
    assert large == begun and not own.programs.coming
    assert len(lowered) == len(begun) + 1  # that, and what admits the first request
