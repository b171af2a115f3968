"""Sparse attention in engines: pages of odd sizes, bfloat16 in deterministic mode, and that the
choice of positions matters. test_families_under_load.py has the other cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NGramDrafter, NoDrafter
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.helpers.alias_checkpoints import random_alias
from tests.helpers.random_models import random_prompts

PLAIN, CHAIN = SpeculationConfig.chain(0), SpeculationConfig.chain(4)
TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)
PROMPTS = [prompt.tolist() for prompt in random_prompts((30, 3, 17))]
NEW_TOKENS = 40


@functools.cache
def target() -> Decoder:
    return random_alias("glm_moe_dsa-shared")


def texts(
    model: Decoder,
    speculation: SpeculationConfig = PLAIN,
    *,
    page_size: int = 16,
    max_rows: int = 3,
    **options: Any,
) -> list[list[int]]:
    """Half of the requests are greedy."""
    plain = speculation.num_nodes == 1
    drafter = NoDrafter() if plain else NGramDrafter(min_match=1)
    params = EngineParams(target=model, drafter=drafter, speculation=speculation)
    cache = CacheConfig(page_size=page_size, max_length=96)
    engine = Engine(params, cache, EngineConfig(max_rows=max_rows, **options))
    ways = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7 * (i % 2), seed=i)
        for i in range(len(PROMPTS))
    ]
    generations = engine.add_all(PROMPTS, ways)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    if not plain:
        assert sum(one.statistics.accepted[1] for one in generations) > 4, "few accepted drafts"
    return [one.token_ids for one in generations]


@functools.cache
def plain() -> list[list[int]]:
    return texts(target())


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "speculation"), [(1, TREE), (7, CHAIN), (13, TREE)])
def test_pages_of_odd_sizes_change_no_text(page_size: int, speculation: SpeculationConfig):
    assert texts(target(), speculation, page_size=page_size, prefill_budget=8) == plain()


@pytest.mark.slow
def test_texts_are_deterministic_in_bfloat16():
    """Plain with one row, then drafted with three."""

    def narrowed(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    model = jax.tree.map(narrowed, target())
    own: dict[str, Any] = {"rounds_per_call": 4, "deterministic": True}
    chain, tree = (dataclasses.replace(shape, verify_width=16) for shape in (CHAIN, TREE))
    alone = dataclasses.replace(PLAIN, verify_width=16)
    expected = texts(model, alone, max_rows=1, **own)
    for shape in (chain, tree):
        assert texts(model, shape, **own) == expected


@pytest.mark.slow
def test_the_choice_matters():
    """Else the other tests would test little."""

    def attending_to_all(layer: Any) -> Any:
        config = layer.mixer.config
        assert isinstance(config, LatentConfig)
        dense = dataclasses.replace(config, indexer=None)
        return layer.replace(mixer=layer.mixer.replace(config=dense, indexer=None))

    whole = target()
    dense = whole.replace(layers=tuple(map(attending_to_all, whole.layers)))
    assert texts(dense) != plain()
