"""DeepSeek-V3 in engines: latent attention with experts, and MTP layers on top."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec import SamplingParams, SpeculationConfig
from jaxspec import load as load_engine
from jaxspec.cache import PagedLatent
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.parallel import make_mesh
from tests.helpers.checkpoints import add_mtp_layer
from tests.helpers.engines import seal
from tests.helpers.families import save_family
from tests.helpers.mtp_families import save_with_mtp


def test_a_token_keeps_one_vector(checkpoint):
    """Of latent and rotated key, in each layer, whatever the number of heads."""
    params = load_engine(checkpoint("deepseek_v3")[0], "ngram", dtype="float32")
    engine = Engine(params, CacheConfig(page_size=4, max_length=16), EngineConfig(max_rows=1))
    state = engine.programs.state.pool.target.layers
    assert all(isinstance(own, PagedLatent) for own in state)
    assert {own.pages.shape[1:] for own in state} == {(1, 4, 48)}


PROMPTS = [list(range(3, 30)), [7, 2, 9], [5] * 12]
NEW_TOKENS = 30


def texts(
    model: Path,
    drafter: str,
    shape: Any = None,
    *,
    page_size: int = 4,
    num_pages: int | None = None,
    **options: Any,
) -> list[list[int]]:
    cache = CacheConfig(page_size=page_size, max_length=64, num_pages=num_pages)
    shape = shape or SpeculationConfig.chain(3)
    params = load_engine(model, drafter, dtype="float32", speculation=shape, **options)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=())
    engine = seal(Engine(params, cache, EngineConfig(max_rows=3)), sampling, len(PROMPTS[0]))
    generations = engine.add_all(PROMPTS, [sampling] * 3)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    if drafter != "none":
        accepting = sum(one.statistics.accepted[1] for one in generations)
        assert accepting > 4, "hardly a draft was accepted: this run tested little"
    if num_pages is not None:
        assert sum(engine.scheduler.preemptions.values()) > 0, "nobody lost its pages"
    return [one.token_ids for one in generations]


TREE = SpeculationConfig(num_nodes=10, max_depth=3, top_k=3)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_family(tmp_path_factory.mktemp("mtp"), "deepseek_v3", rope_parameters=None)
    return add_mtp_layer(path, "deepseek")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose MTP layer guesses well."""
    return save_with_mtp(tmp_path_factory.mktemp("drafting"), "deepseek_v3")


@pytest.fixture(scope="module")
def plain(drafting: Path) -> list[list[int]]:
    return texts(drafting, "none")


@pytest.mark.slow  # by default: paged logits, and those of the draft head, against transformers
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("mtp", {"shape": TREE}),
        ("mtp", {}),
        ("ngram", {"page_size": 1}),
        ("ngram", {"shape": TREE, "page_size": 16}),
        ("ngram+mtp", {"num_pages": 24}),
    ],
)
def test_texts_are_those_of_plain_decoding(
    drafter: str, options: dict[str, Any], drafting: Path, plain: list[list[int]]
):
    assert texts(drafting, drafter, **options) == plain


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_give_the_text_of_one(devices: int, drafting: Path, plain: list[list[int]]):
    """Heads and experts are split; every device has all latents."""
    mesh = make_mesh(tensor_parallel=devices)
    assert texts(drafting, "mtp", TREE, mesh=mesh) == plain


def test_the_mtp_layer_has_latent_attention_and_experts(with_mtp: Path):
    drafter: Any = load_engine(with_mtp, "mtp", dtype="float32").drafter
    assert drafter.head.config.layers == load_model_config(with_mtp).layers[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "mtp"])
def test_prefixes_are_shared(drafter: str, drafting: Path, plain: list[list[int]]):
    params = load_engine(drafting, drafter, dtype="float32")
    engine = Engine(params, CacheConfig(page_size=4, max_length=64), EngineConfig(max_rows=1))
    for _ in range(2):
        sampling = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=())
        generation = engine.add(PROMPTS[0], sampling)
        engine.finish([generation])
        assert generation.token_ids == plain[0]
    assert engine.scheduler.cache_statistics()[1] >= 20


def test_sequences_are_not_spread(with_mtp: Path):
    mesh = make_mesh(sequence_parallel=2)
    with pytest.raises(ValueError, match="keeps whole sequences on a device: take sp 1"):
        texts(with_mtp, "ngram", mesh=mesh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ({"q_lora_rank": "x"}, "q_lora_rank must be a positive integer or null, got 'x'"),
        (
            {"qk_rope_head_dim": 7, "qk_head_dim": None, "head_dim": None},
            "rotary embedding needs an even head_dim, not 7",
        ),
        ({"first_k_dense_replace": None}, "first_k_dense_replace must be an integer"),
        ({"first_k_dense_replace": -1}, "must be an integer from 0 on, got -1"),
    ],
)
def test_unsupported_configs_are_named(checkpoint, change: dict[str, Any], message: str):
    raw = json.loads((checkpoint("deepseek_v3-halves")[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw | change)


def test_eagle_heads_have_layers_of_another_kind(checkpoint):
    layer = load_model_config(checkpoint("deepseek_v3-halves")[0]).layers[0]
    with pytest.raises(ValueError, match="LatentConfig are not supported here"):
        _ = layer.attention
