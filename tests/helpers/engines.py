"""Small engines on random models, for tests of the engine."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import LLM
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.functional import EngineParams
from tests.helpers.random_models import make_params

CHAIN = SpeculationConfig.chain(2)
LENGTH = 64
FEW = 14  # pages, too few for four rows of that length
CROWDED = CacheConfig(page_size=8, max_length=LENGTH, num_pages=FEW)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8)
FULL = dataclasses.replace(SAMPLED, logprobs=1, prompt_logprobs=1)  # every program serves all
# Its rounds serve all but structured requests.
POLICY = dataclasses.replace(FULL, policy_logprobs=True)
# Its prompts are read with masks, by a program that reads all others' prompts, too.
STRUCTURED = dataclasses.replace(FULL, structured=StructuredOutput(json_object=True))


def new_engine(
    drafter: str = "ngram", num_pages: int | None = None, max_length: int = LENGTH, **options: Any
) -> Engine:
    """An engine of four rows; ``options`` are those of EngineConfig."""
    cache = CacheConfig(page_size=8, max_length=max_length, num_pages=num_pages)
    options = {"rounds_per_call": 4, "max_rows": 4} | options
    return Engine(make_params(drafter, CHAIN), cache, EngineConfig(**options))


def ready_engine(drafter: str = "ngram", num_pages: int | None = None, **options: Any) -> Engine:
    """The same with few programs, for its largest calls, which are compiled: smaller calls run in
    them too."""
    return seal(new_engine(drafter, num_pages, **options))


@functools.cache
def engine_of_options(
    drafter: str = "ngram", num_pages: int | None = FEW, preemption: str = "recompute"
) -> Engine:
    """For requests with any options. It has too few pages for its rows; None: enough."""
    return seal(new_engine(drafter, num_pages, preemption=preemption), POLICY)


def seal(own: Engine, sampling: SamplingParams = SAMPLED, prompt_tokens: int = 17) -> Engine:
    """Compile the programs of the largest calls with ``sampling``; others run in them too."""
    compile_by_running(own, own.config.max_rows, prompt_tokens, sampling)
    own.programs.sealed = True
    return own


def tiny_llm(
    path: Path,
    drafter: str = "ngram",
    *,
    kinds: Sequence[SamplingParams] = (FULL,),
    max_rows: int = 4,
    trees: bool = False,
    **other: Any,
) -> LLM:
    """It has few programs, which are compiled: for requests of these ``kinds``."""
    config = EngineConfig(max_rows=max_rows, rounds_per_call=4, max_queue=64, trees=trees)
    other |= {"speculation": CHAIN, "max_length": 256, "page_size": 8, "engine": config}
    llm = LLM(path, drafter, **other)
    for kind in kinds:
        seal(llm.engine, kind)
    return llm


def sampled_texts(params: EngineParams) -> list[list[int]]:
    """Of two rows that sample, with a drafter whose drafts are accepted."""
    engine = Engine(params, CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=2))
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=16, stop_token_ids=())
    generations = [engine.add(prompt, sampling) for prompt in ([5, 9, 2, 7], list(range(30)))]
    engine.finish(generations)
    accepting = sum(one.statistics.accepted[1] for one in generations)
    assert accepting > 4, "hardly a draft was accepted: this run tested little"
    return [generation.token_ids for generation in generations]


@functools.cache
def plain_engine(max_length: int = LENGTH) -> Engine:
    """Decodes one request after the other, without speculation."""
    return ready_engine("none", max_length=max_length, max_rows=1, prefix_caching=False)
