"""The engine with every sampling option, against plain references, with preemptions."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from tests.decoding.test_sampling_options import all_options, expected, prompts_of
from tests.helpers.engines import FEW, engine_of_options, new_engine, ready_engine
from tests.helpers.marks import slow
from tests.helpers.programs import traces
from tests.helpers.random_models import random_prompts, random_target
from tests.helpers.sampling_reference import plain_logits

PROMPT = random_prompts((19,), seed=2)[0].tolist()


def run(own: Engine, prompt: list[int], sampling: SamplingParams) -> Generation:
    generation = own.add(prompt, sampling)
    own.finish([generation])
    return generation


@pytest.mark.parametrize("drafter", ["ngram", slow("eagle3")])
@pytest.mark.parametrize("preemption", ["recompute", slow("swap")])
def test_texts_are_those_of_transformers_processors(drafter: str, preemption: str):
    own, sampling = engine_of_options(drafter, preemption=preemption), all_options()
    before = own.scheduler.preemptions[preemption]
    prompts = [prompt.tolist() for prompt in prompts_of(len(sampling))]
    generations = own.add_all(prompts, sampling)
    own.finish(generations)
    for generation, wanted in zip(generations, expected(), strict=True):
        found = [*generation.prompt, *generation.token_ids]
        assert found == wanted, generation.sampling
    assert own.scheduler.preemptions[preemption] > before


@pytest.mark.slow
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
    own = ready_engine("none", max_rows=1)  # the programs of plain_engine()
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


def reference_logprobs(tokens: list[int]) -> np.ndarray:
    """After each token, of every token, by a dense pass: [S, V]."""
    logits = plain_logits(random_target(), np.array([tokens], np.int32))
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))[0]


def check_entry(found: Any, token: int, logprobs: np.ndarray, alternatives: int) -> None:
    assert found.token_id == token
    np.testing.assert_allclose(found.logprob, logprobs[token], atol=2e-5)
    likeliest = np.sort(logprobs)[::-1][:alternatives]
    np.testing.assert_allclose([value for _, value in found.top], likeliest, atol=2e-5)
    np.testing.assert_allclose([logprobs[i] for i, _ in found.top], likeliest, atol=2e-5)


@pytest.mark.parametrize("num_pages", [slow(None), FEW])  # few pages: requests are preempted
def test_logprobs_are_those_of_the_raw_logits(num_pages: int | None):
    own = engine_of_options(num_pages=num_pages)
    before = own.scheduler.preemptions["recompute"]
    common: dict[str, Any] = {"max_tokens": 25, "temperature": 0.8, "seed": 3}
    sampling = [
        SamplingParams(**common),
        SamplingParams(**common, logprobs=0, prompt_logprobs=2),
        SamplingParams(**common, logprobs=4, logit_bias={5: 3.0}),
        SamplingParams(max_tokens=25, logprobs=20, prompt_logprobs=0),
    ]
    prompts = [prompt.tolist() for prompt in random_prompts((len(PROMPT),) * 4, seed=8)]
    for _ in range(2):  # the second time there is a prefix that could be hit
        generations = own.add_all(prompts, sampling)
        own.finish(generations)
        for generation, params in zip(generations, sampling, strict=True):
            tokens = [*generation.prompt, *generation.token_ids]
            wanted = reference_logprobs(tokens)[:-1]
            entries = [*(generation.prompt_logprobs or [None] * len(PROMPT))]
            assert len(entries) == len(PROMPT) and entries[0] is None
            for place in range(1, len(PROMPT)):
                if params.prompt_logprobs is not None:
                    least = params.prompt_logprobs
                    check_entry(entries[place], tokens[place], wanted[place - 1], least)
            assert (generation.logprobs is None) == (params.logprobs is None)
            for place, entry in enumerate(generation.logprobs or ()):
                at = len(PROMPT) + place
                check_entry(entry, tokens[at], wanted[at - 1], params.logprobs or 0)
            if params.logprobs is not None:
                assert len(generation.logprobs or ()) == len(generation.token_ids) == 25
    preempted = own.scheduler.preemptions["recompute"] - before
    assert (preempted > 0) == (num_pages is not None)


def test_samples_share_their_prompt_and_have_the_seeds_after_the_first():
    own = engine_of_options()
    before = own.scheduler.cache_statistics()
    sampling = SamplingParams(temperature=1.0, seed=2**32 - 1, max_tokens=9, n=2, best_of=3)
    generations = own.add_all([PROMPT, PROMPT[:5]], [sampling, SamplingParams(max_tokens=9)])
    own.finish(generations)
    assert len(generations) == 4
    queries, hits = np.subtract(own.scheduler.cache_statistics(), before)
    assert (queries, hits) == (len(PROMPT) + 5, 0), "more than one sample read the prompt"
    for seed, generation in zip((2**32 - 1, 0, 1), generations, strict=False):
        alone = run(own, PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=9))
        assert generation.token_ids == alone.token_ids and generation.sampling.seed == seed
    assert len({tuple(generation.token_ids) for generation in generations}) == 4
    with pytest.raises(ValueError, match="add starts one sample"):
        own.add(PROMPT, sampling)


def test_equal_prompts_of_a_call_are_read_once():
    """As trainers give them: a prompt as often as it has samples."""
    own = engine_of_options()
    own.forget_texts()
    before = own.scheduler.cache_statistics()
    sampling = [SamplingParams(temperature=1.0, seed=seed, max_tokens=9) for seed in range(3)]
    generations = own.add_all([PROMPT, list(PROMPT), PROMPT], sampling)
    own.finish(generations)
    queries, hits = np.subtract(own.scheduler.cache_statistics(), before)
    assert (queries, hits) == (len(PROMPT), 0), "more than one of them read the prompt"
    assert [each.cached_tokens for each in generations] == [0, *[len(PROMPT)] * 2]
    for params, generation in zip(sampling, generations, strict=True):
        assert generation.token_ids == run(own, PROMPT, params).token_ids
