"""Small engines on random models, for tests of the engine."""

import functools
from typing import Any

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from tests.random_models import make_params

CHAIN = SpeculationConfig.chain(2)
LENGTH = 64


def new_engine(
    drafter: str = "ngram", num_pages: int | None = None, max_length: int = LENGTH, **options: Any
) -> Engine:
    """An engine of four rows; ``options`` are those of EngineConfig."""
    cache = CacheConfig(page_size=8, max_length=max_length, num_pages=num_pages)
    options = {"rounds_per_call": 4, "max_rows": 4} | options
    return Engine(make_params(drafter, CHAIN), cache, EngineConfig(**options))


@functools.cache
def plain_engine(max_length: int = LENGTH) -> Engine:
    """Decodes one request after the other, without speculation."""
    return new_engine("none", max_length=max_length, max_rows=1, prefix_caching=False)
