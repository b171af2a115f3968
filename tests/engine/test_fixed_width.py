"""At a fixed verify width programs are compiled so that they round alike; see docs/exactness.md."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

import jaxspec.engine.programs.pipeline.programs
import jaxspec.engine.programs.pipeline.stage_programs
import jaxspec.engine.programs.programs
from jaxspec import functional
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from tests.engine.test_pipeline import one_device, staged
from tests.helpers.random_models import empty_state, make_params

CACHE = CacheConfig(page_size=8, max_length=64)
WIDTHS = [None, 8]
MODULES = (
    jaxspec.engine.programs.programs,
    jaxspec.engine.programs.pipeline.programs,
    jaxspec.engine.programs.pipeline.stage_programs,
)


def with_width(params: EngineParams, width: int | None) -> EngineParams:
    return params.replace(speculation=dataclasses.replace(params.speculation, verify_width=width))


def barriers(function: Any, *arguments: Any) -> int:
    return jax.jit(function).lower(*arguments).as_text().count("optimization_barrier")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stages", [1, 2])
def test_engines_compile_without_dropped_roundings(
    stages: int, width: int | None, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, set[bool]] = {module.__name__: set() for module in MODULES}

    def recording(module: Any, function: Any) -> Any:
        def options(array: jax.Array, *, deterministic: bool, reads: bool = False) -> Any:
            asked[module.__name__].add(deterministic)
            return function(array, deterministic=deterministic, reads=reads)

        return options

    for module in MODULES:
        own = recording(module, module.compiler_options)
        monkeypatch.setattr(module, "compiler_options", own)
    params = one_device("ngram")
    if stages == 2:
        params = staged(params, (2, 2))
    Engine(with_width(params, width), CACHE, EngineConfig(max_rows=2))
    of_stages = asked.pop("jaxspec.engine.programs.pipeline.stage_programs")
    assert asked.pop("jaxspec.engine.programs.programs") == {width is not None}
    if stages == 2:
        assert (
            of_stages
            == asked.pop("jaxspec.engine.programs.pipeline.programs")
            == {width is not None}
        )


def test_prompts_are_read_block_by_block():
    def found(width: int | None) -> int:
        params = with_width(make_params("ngram", SpeculationConfig.chain(3)), width)
        read = functools.partial(functional.prefill, width=8, greedy=True)
        return barriers(read, params, empty_state(params, 2, 64, 8))

    assert found(8) > found(None)
