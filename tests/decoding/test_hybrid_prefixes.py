"""Models with recurrent layers: prompts that begin alike share pages, where a snapshot of the
recurrent states is left, and texts stay as they are without that."""

from typing import Any

import pytest

from jaxspec.checkpoints.load import load
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.plans.host_copies import snapshot_bytes
from jaxspec.functional import EngineParams
from tests.decoding.test_hybrid_exactness import checkpoint  # noqa: F401
from tests.helpers.engines import seal
from tests.helpers.marks import slow
from tests.helpers.random_models import random_prompts

COMMON, *ENDS = (prompt.tolist() for prompt in random_prompts((75, 3, 20, 41)))
PROMPTS = [COMMON + ENDS[0], COMMON + ENDS[1], COMMON + ENDS[2], COMMON[:70], COMMON + ENDS[1]]


def served(
    params: EngineParams,
    temperature: float,
    page_size: int,
    num_pages: int | None = None,
    **options: Any,
) -> tuple[list[list[int]], Engine]:
    """Texts of prompts one after the other, then of all together; every second is sampled."""
    config = EngineConfig(max_rows=3, rounds_per_call=4, prefill_budget=32, **options)
    engine = Engine(
        params, CacheConfig(page_size=page_size, max_length=160, num_pages=num_pages), config
    )
    seal(engine, SamplingParams(temperature=temperature), prompt_tokens=32)
    texts, accepted = [], 0
    for group in [*([one] for one in PROMPTS), PROMPTS]:
        sampling = [
            SamplingParams(max_tokens=20, seed=index, temperature=temperature * (index % 2))
            for index in range(len(group))
        ]
        generations = engine.add_all(group, sampling)
        engine.finish(generations)
        assert not any(one.error for one in generations)
        texts += [one.token_ids for one in generations]
        accepted += sum(one.statistics.accepted[1] for one in generations)
    assert accepted > 8, "hardly a draft was accepted: this run tested little"
    return texts, engine


@pytest.mark.parametrize(
    ("family", "drafter", "page_size", "num_pages", "room"),
    [
        ("two layers", "ngram", 16, None, 2),
        slow("qwen3_5_text", "ngram", 16, None, 2),
        slow("qwen3_5_text", "mtp", 16, None, 2),
        slow("qwen3_5_text", "mtp", 16, None, None),
        slow("qwen3_5_text", "ngram", 16, None, None),
        slow("qwen3_5_text", "mtp", 64, None, None),
        slow("qwen3_5_text", "mtp", 64, None, 1),
        slow("qwen3_5_text", "mtp", 5, 34, 3),
        slow("qwen3_5_text", "ngram", 5, 34, None),
        slow("bamba", "ngram", 5, 34, None),
        slow("falcon_h1", "ngram", 5, 34, None),
        slow("kimi_linear", "ngram", 5, 34, None),
        slow("glm5_next_text", "ngram", 5, 34, None),
        slow("bailing_hybrid", "ngram", 5, 34, None),
        slow("qwen4_exp_text", "mtp", 5, None, None),
        slow("nemotron_h", "mtp", 5, 34, None),
        slow("lfm2", "ngram", 16, None, 2),
        slow("lfm2", "ngram", 5, 34, None),
    ],
)
def test_texts_are_those_without_a_prefix_cache(
    checkpoint,  # noqa: F811
    family: str,
    drafter: str,
    page_size: int,
    num_pages: int | None,
    room: int | None,
):
    """``room``: snapshots that fit."""
    params = load(
        checkpoint(family), drafter, dtype="float32", speculation=SpeculationConfig.chain(3)
    )
    # The quick case is greedy: of smaller programs.
    temperature = 0.0 if family == "two layers" else 0.7
    expected, plain = served(params, temperature, page_size, prefix_caching=False)
    assert plain.limits.snapshots is None and plain.snapshot_bytes == 0
    one = snapshot_bytes(params, plain.programs.sizes)
    memory = 4.0 if room is None else (room + 0.5) * one / 2**30
    found, engine = served(params, temperature, page_size, num_pages, snapshot_memory=memory)
    assert found == expected
    assert engine.scheduler.cache_statistics()[1] > 0
    assert room is None or engine.limits.snapshots == room
    assert engine.snapshot_bytes % one == 0 < engine.snapshot_bytes <= memory * 2**30
    if num_pages is not None:
        assert sum(engine.scheduler.preemptions.values()) > 0
