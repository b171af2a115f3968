"""An engine short of pages serves each family: prompts begin alike, texts stop early, requests lose
their pages, and drafts change no text."""

import functools
from typing import Any

import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mtp import AFTER_BEFORE, BEFORE, BEFORE_AFTER
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import (
    AssistantDrafter,
    Drafter,
    EagleDrafter,
    NGramDrafter,
    NoDrafter,
)
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.decoding import test_exactness_of_experts as test_experts
from tests.decoding import test_family_exactness, test_hybrid_exactness
from tests.helpers import alias_checkpoints, mtp_families
from tests.helpers.engines import seal
from tests.helpers.random_assistants import random_assistant
from tests.helpers.random_models import generate, make_drafter, mtp_head, random_prompts
from tests.helpers.sampling_reference import reference_texts

DENSE = tuple(test_family_exactness.CONFIGS)
EXPERTS = tuple(test_experts.FAMILIES)
# Layers of other families under other names. A random model of the one left out repeats a token.
ALIASES = tuple(name for name in alias_checkpoints.VARIANTS if name != "glm5_next-unbounded")
# What no other family has: factors of queries by position, norms after the rotation, MLPs without a
# gate, mixer and MLP side by side, KV heads that differ by layer, or are those of another layer,
# positions that an indexer chooses, or pools or blocks of these, chunks, several residual streams,
# entries of spans of tokens, n-grams.
RARE = (
    *("ministral3", "mistral4", "hunyuan", "apertus", "cohere2", "gemma4", "gemma4-small"),
    *("deepseek_v32", "glm_moe_dsa-shared", "llama4_text", "glm5_next", "deepseek_v4"),
    *("qwen4_exp", "qwen4_exp_text"),
    *("minimax_m3", "minimax_m3-local", "hy_v4"),
)
WITH_MTP: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "mimo": {"layout": "mimo", "states": BEFORE_AFTER},
    "mimo, windows": {"layout": "mimo", "states": BEFORE_AFTER},
    "nemotron_h": test_hybrid_exactness.MTP["nemotron_h"],
    "qwen3_next": {"layout": "qwen"},
    "qwen3_5_text": {"layout": "qwen"},
    "qwen3_5_moe_text": {"layout": "qwen"},
    "deepseek_v32": {},
    "glm5_next": {},
    "deepseek_v4": {"layout": "deepseek_v4", "states": BEFORE},
    "qwen4_exp": {"layout": "qwen4_exp", "states": BEFORE},
    "ernie4_5_moe": {"layout": "ernie"},
    "exaone_moe": {"layout": "qwen"},
    "mellum": {"layout": "qwen"},
    "bailing_hybrid": {},
    "minimax_m3": {"layout": "minimax_m3", "states": AFTER_BEFORE},
}
# Of the model's last layer, and so of its MTP layer; all texts are longer.
WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
RECURRENT = ("lfm2", "bamba", "granite 4", "falcon_h1", "kimi_linear", "glm5_next_text")
FAMILIES = (
    *(*DENSE, *EXPERTS, *RECURRENT),
    *(name for name in WITH_MTP if name not in (*EXPERTS, *ALIASES)),
)
SHAPES = {
    "chain": SpeculationConfig.chain(3),
    "tree": SpeculationConfig(num_nodes=8, max_depth=3, top_k=2),
    "wide tree": SpeculationConfig(num_nodes=20, max_depth=2, top_k=11),
    "short chain": SpeculationConfig.chain(1),
}
UNLIKELY = ("phi3", "olmo3")  # their random models take few drafts of a narrow tree of EAGLE-3's
COMMON, *ENDS = (prompt.tolist() for prompt in random_prompts((35, 3, 9, 1, 14)))
PROMPTS = [COMMON + end for end in ENDS]
NEW_TOKENS = 40
ROWS, PAGE, LENGTH = 3, 5, 96
FEW = 24  # pages: one request has room, and three have not


@functools.cache
def target(family: str) -> Decoder:
    if family in DENSE:
        return test_family_exactness.target(family)
    if family in EXPERTS:
        return test_experts.target(family)
    if family in ALIASES:
        return alias_checkpoints.random_alias(family)
    if family in test_hybrid_exactness.CONFIGS:
        return test_hybrid_exactness.target(family)
    if family == "mimo, windows":
        return mtp_families.random_family("mimo", **WINDOW)
    return mtp_families.random_family(family)


def params_of(family: str, drafter: str) -> EngineParams:
    """``drafter``: its name, and the shape of what it drafts."""
    model, (name, _, shape) = target(family), drafter.partition(" ")
    if name == "none":
        plain = SpeculationConfig.chain(0)
        return EngineParams(target=model, drafter=NoDrafter(), speculation=plain)
    made: Drafter = NGramDrafter(min_match=1)
    if name in ("assistant", "ordered"):
        made = AssistantDrafter(assistant=random_assistant(model, ordered=name == "ordered"))
    elif name == "mtp":
        made = EagleDrafter(head=mtp_head(model, **WITH_MTP.get(family, {})))
    elif name != "ngram":
        made = make_drafter(name, model)
    return EngineParams(target=model, drafter=made, speculation=SHAPES[shape])


def sampling(stops: tuple[int, ...]) -> list[SamplingParams]:
    """Half of the requests are greedy."""
    return [
        SamplingParams(
            max_tokens=NEW_TOKENS, temperature=0.7 * (index % 2), seed=index, stop_token_ids=stops
        )
        for index in range(len(PROMPTS))
    ]


@functools.cache
def plain(family: str) -> list[list[int]]:
    """Whole texts without drafts, with pages for all and none of them shared."""
    config = EngineConfig(max_rows=ROWS, rounds_per_call=4, prefix_caching=False)
    cache = CacheConfig(page_size=16, max_length=LENGTH)
    engine = Engine(params_of(family, "none"), cache, config)
    seal(engine, SamplingParams(temperature=0.7), prompt_tokens=32)
    generations = engine.add_all(PROMPTS, sampling(()))
    engine.finish(generations)
    assert not any(one.error for one in generations)
    return [one.token_ids for one in generations]


def until(text: list[int], stops: tuple[int, ...]) -> list[int]:
    ends = [index for index, token in enumerate(text) if token in stops]
    return text[: ends[0] + 1] if ends else text


def stops_in(texts: list[list[int]]) -> tuple[int, ...]:
    """The token that ends a text before its limit, and of all texts the least."""
    late = {text[i] for text in texts for i in range(3, NEW_TOKENS - 4) if text.index(text[i]) == i}
    return (max(sorted(late), key=lambda token: sum(len(until(text, (token,))) for text in texts)),)


# EAGLE-3 reads three hidden states, which every family has, and brings attention of its own: so it
# applies to all of them.
CASES = (
    *((family, "ngram chain") for family in (*FAMILIES, *ALIASES)),
    *((family, "ngram tree") for family in ("gemma2", "qwen3_next", "lfm2", *RARE)),
    # A random head of EAGLE-3 guesses nothing of this one.
    *(("lfm2_moe", f"ngram {shape}") for shape in ("chain", "tree")),
    *((family, f"mtp {shape}") for family in WITH_MTP for shape in ("chain", "tree")),
    ("glm_moe_dsa-shared", "mtp tree"),
    *((family, f"eagle3 {'wide ' * (family in UNLIKELY)}tree") for family in FAMILIES),
    ("minimax_m3", "eagle3 tree"),
    *((family, "draft_model tree") for family in DENSE),
    *(("gemma4", f"assistant {shape}") for shape in ("chain", "tree", "wide tree")),
    *(("gemma4-experts", f"assistant {shape}") for shape in ("chain", "tree")),
    ("gemma4-experts", "ordered tree"),
    *(("gemma4-small", f"{kind} tree") for kind in ("assistant", "ordered")),
    *((family, "eagle1 tree") for family in ("gemma", "olmo2")),
    *(
        (family, "eagle3 chain")
        for family in ("gemma2", "mimo, windows", "qwen3_5_moe_text", "lfm2")
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_text_is_that_of_plain_decoding(family: str, drafter: str):
    whole = plain(family)
    stops = stops_in(whole)
    expected = [until(text, stops) for text in whole]
    assert any(3 < len(text) < NEW_TOKENS for text in expected)
    config = EngineConfig(max_rows=ROWS, rounds_per_call=4, prefill_budget=32)
    cache = CacheConfig(page_size=PAGE, max_length=LENGTH, num_pages=FEW)
    engine = Engine(params_of(family, drafter), cache, config)
    seal(engine, SamplingParams(temperature=0.7), prompt_tokens=32)
    ways, done = sampling(stops), []
    # One after the other at first: recurrent layers leave snapshots where prompts part.
    for group in ([0], [1], range(len(PROMPTS))):
        added = engine.add_all([PROMPTS[i] for i in group], [ways[i] for i in group])
        engine.finish(added)
        assert not any(one.error for one in added)
        assert [one.token_ids for one in added] == [expected[i] for i in group]
        done += added
    assert sum(one.statistics.accepted[1] for one in done) > 4, "hardly a draft was accepted"
    assert engine.scheduler.cache_statistics()[1] >= len(COMMON) // PAGE * PAGE, "no page was found"
    assert sum(engine.scheduler.preemptions.values()) > 0, "nobody lost its pages"


def test_an_mtp_layer_with_a_window_drafts_the_text_of_plain_decoding():
    """The guard of the slow tests above, in fewer programs; of lost pages it is test_engine.py."""
    prompts, params = random_prompts((20, 9)), params_of("mimo, windows", "mtp short chain")
    found, state = generate(params, prompts, page_size=PAGE, max_lens=[60, 49])
    assert isinstance(params.drafter, EagleDrafter)
    assert params.drafter.head.config.layers[0].attention.window == WINDOW["sliding_window"]
    assert state.rows.stats.accepted[:, 1].sum() > 4, "hardly a draft was accepted"
    greedy = [SamplingParams(max_tokens=40)] * 2
    assert found == reference_texts(params.target, prompts, greedy, 60, found)
