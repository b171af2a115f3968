"""The engine with every sampling option, against plain references, with preemptions."""

import functools
from typing import Any

import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.generation import Generation
from jaxspec.scheduling.requests import SamplingParams
from tests.marks import slow
from tests.programs import traces
from tests.random_models import make_params, random_prompts
from tests.speculation.test_sampling_options import LENGTH, all_options, expected, prompts_of

CHAIN = SpeculationConfig.chain(2)
PROMPT = random_prompts((19,), seed=2)[0].tolist()


def new_engine(drafter: str = "ngram", num_pages: int | None = None, **options: Any) -> Engine:
    cache = CacheConfig(page_size=8, max_length=LENGTH, num_pages=num_pages)
    options = {"rounds_per_call": 4, "max_rows": 4} | options
    return Engine(make_params(drafter, CHAIN), cache, **options)


@functools.cache
def engine() -> Engine:
    return new_engine()


@functools.cache
def plain() -> Engine:
    return new_engine("none", max_rows=1, prefix_caching=False)


def run(own: Engine, prompt: list[int], sampling: SamplingParams) -> Generation:
    generation = own.add(prompt, sampling)
    own.finish([generation])
    return generation


@pytest.mark.parametrize("drafter", ["ngram", slow("eagle3")])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_texts_are_those_of_transformers_processors(drafter: str, preemption: str):
    own, sampling = new_engine(drafter, num_pages=18, preemption=preemption), all_options()
    prompts = [prompt.tolist() for prompt in prompts_of(len(sampling))]
    generations = own.add_all(prompts, sampling)
    own.finish(generations)
    for generation, wanted in zip(generations, expected(), strict=True):
        found = [*generation.prompt, *generation.token_ids]
        assert found == wanted, generation.sampling
    assert own.scheduler.preemptions[preemption] > 0


def test_requests_without_controls_keep_their_programs():
    own, ordinary = new_engine(), SamplingParams(max_tokens=12)
    text = run(own, PROMPT, ordinary).token_ids
    before = traces(own.programs.decode), traces(own.programs.prefill)
    for bias in ({3: 2.0}, {4: -1.0}):
        run(own, PROMPT, SamplingParams(max_tokens=12, logit_bias=bias))
    # The next one in the row of a request with bias has none.
    assert run(own, PROMPT, ordinary).token_ids == text
    both = [ordinary, SamplingParams(max_tokens=12, bad_token_ids=(text[0],))]
    generations = own.add_all([PROMPT] * 2, both)
    own.finish(generations)
    assert generations[0].token_ids == text
    assert text[0] not in generations[1].token_ids
    after = traces(own.programs.decode), traces(own.programs.prefill)
    # One kind of program was added: in sizes of one and of two rows.
    assert after[0] - before[0] <= 2 and after[1] - before[1] <= 2


def test_priority_and_salt_reach_the_scheduler():
    own = new_engine(max_rows=1)
    later, first = own.add_all(
        [PROMPT] * 2,
        [SamplingParams(max_tokens=5, priority=p, cache_salt=f"salt {p}") for p in (1, 0)],
    )
    while not first.done:
        assert not later.token_ids
        own.step()
    own.finish([later])
    assert own.scheduler.cache_statistics()[1] == 0, "pages were shared over salts"
    run(own, PROMPT, SamplingParams(max_tokens=5, cache_salt="salt 1"))
    assert own.scheduler.cache_statistics()[1] == 16
