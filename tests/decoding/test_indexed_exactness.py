"""Sparse attention in engines: pages of odd sizes, bfloat16 in deterministic mode, and that the
choice of positions matters. test_families_under_load.py has the other cases."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NGramDrafter, NoDrafter
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.tensors import splitting
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.quantized_checkpoints import float8_blocks, quantize_checkpoint
from tests.helpers.random_models import random_prompts

PLAIN, CHAIN = SpeculationConfig.chain(0), SpeculationConfig.chain(4)
TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)
PROMPTS = [prompt.tolist() for prompt in random_prompts((30, 3, 17))]
NEW_TOKENS = 40


FAMILY = "glm_moe_dsa-shared"


@functools.cache
def target() -> Decoder:
    return random_alias(FAMILY)


def texts(
    model: Decoder,
    speculation: SpeculationConfig = PLAIN,
    *,
    page_size: int = 16,
    max_rows: int = 3,
    **options: Any,
) -> list[list[int]]:
    """Half of the requests are greedy."""
    drafter = NoDrafter() if speculation.num_nodes == 1 else NGramDrafter(min_match=1)
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
    if speculation.num_nodes > 1:
        assert sum(one.statistics.accepted[1] for one in generations) > 4, "few accepted drafts"
    return [one.token_ids for one in generations]


@functools.cache
def plain() -> list[list[int]]:
    return texts(target())


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "speculation"), [(1, TREE), (7, CHAIN), (13, TREE)])
def test_pages_of_odd_sizes_change_no_text(page_size: int, speculation: SpeculationConfig):
    assert texts(target(), speculation, page_size=page_size, prefill_budget=8) == plain()


def assert_deterministic_in_bfloat16(target: Decoder) -> None:
    """The texts, plain with one row, are those that are drafted with three."""

    def narrowed(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    model = jax.tree.map(narrowed, target)
    own: dict[str, Any] = {"rounds_per_call": 4, "deterministic": True}
    alone = dataclasses.replace(PLAIN, verify_width=16)
    expected = texts(model, alone, max_rows=1, **own)
    for shape in (CHAIN, TREE):
        assert texts(model, dataclasses.replace(shape, verify_width=16), **own) == expected


@pytest.mark.slow
def test_texts_are_deterministic_in_bfloat16():
    assert_deterministic_in_bfloat16(target())


@pytest.mark.slow
def test_speculation_changes_no_text_of_the_published_layout(tmp_path: Path):
    """GLM-5.2's FP8 files have an indexer's queries and keys in 8 bits, and its weights of heads as
    they are."""

    def quantized(name: str) -> bool:
        projection = name.endswith("proj.weight") and "weights_proj" not in name
        return projection or name.endswith(("wq_b.weight", "wk.weight"))

    whole = target()
    save_tree(tmp_path / "wide", whole, whole.mapped(splitting()), raw_config(FAMILY))
    directory, _ = quantize_checkpoint(tmp_path / "wide", tmp_path, float8_blocks(), quantized)
    model = load(directory, "none", dtype="float32").target
    mixer: Any = model.layers[0].mixer
    indexer = mixer.indexer
    assert [type(part) for part in (indexer.q, indexer.k, indexer.weights)] == [
        *(Float8Linear, Float8Linear, Linear)
    ]
    assert texts(model, TREE) == texts(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAMILY, "glm5_next"])
def test_the_choice_matters(family: str):
    """Else the other tests would test little."""

    def attending_to_all(layer: Any) -> Any:
        config = layer.mixer.config
        if not isinstance(config, LatentConfig):
            return layer
        dense = dataclasses.replace(config, indexer=None)
        return layer.replace(mixer=layer.mixer.replace(config=dense, indexer=None))

    whole = random_alias(family)
    dense = whole.replace(layers=tuple(map(attending_to_all, whole.layers)))
    assert texts(dense) != texts(whole)
