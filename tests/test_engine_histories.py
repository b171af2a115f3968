"""Requests added, cancelled and stepped in any order: each has the text that it has alone."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.engine import Preemption
from jaxspec.config.speculation import TreeShape
from jaxspec.engine import Engine
from jaxspec.generation import Generation
from jaxspec.scheduling.requests import SamplingParams
from tests.block_heads import block_params
from tests.engines import CHAIN, LENGTH, plain_engine
from tests.random_models import DRAFTERS, random_prompts
from tests.speculation.test_block_exactness import engine_of, plain_params
from tests.test_engine import SHAPES, alone, check_pages, crowded


@functools.cache
def crowded_blocks(drafter: str, preemption: Preemption) -> Engine:
    """A crowded engine (see test_engine.crowded) with a block head, and a target of its own."""
    return engine_of(block_params(drafter, CHAIN), num_pages=14, max_rows=3, preemption=preemption)


@functools.cache
def plain_blocks_engine() -> Engine:
    return engine_of(plain_params(), max_rows=1, prefix_caching=False)


History = list[tuple[str, int]]  # what is done, and a number that says how
KINDS = ("add", "add", "add", "cancel", "step", "step", "step", "shape")
SHARED = random_prompts((24,), seed=11)[0].tolist()
LONGEST = LENGTH - len(SHARED) - 7  # new tokens that fit after every prompt_of
SHORT = range(1, 24)
LONG = (*range(LONGEST - 14, LONGEST + 1), 1, 5)  # at their ends most pairs need all pages


def histories(least: int, most: int) -> st.SearchStrategy[History]:
    """Of so many steps."""
    step = st.tuples(st.sampled_from(KINDS), st.integers(0, 2**16))
    return st.lists(step, min_size=least, max_size=most)


def prompt_of(number: int) -> list[int]:
    """Prompts that share pages with each other, and some that do not."""
    rng = np.random.default_rng(number)
    shared = SHARED[: int(rng.integers(25))] if rng.random() < 0.7 else []
    return [*shared, *rng.integers(96, size=rng.integers(1, 8)).tolist()]


def run_history(
    own: Engine,
    history: History,
    shapes: tuple[TreeShape | None, ...] = SHAPES,
    plain: Callable[[], Engine] = plain_engine,
    new_tokens: Sequence[int] = SHORT,
) -> None:
    generations: list[Generation] = []
    for name, number in history:
        live = [generation for generation in generations if not generation.done]
        if name == "add":
            temperature = 0.8 * (number % 2)
            sampling = SamplingParams(
                temperature,
                seed=number % 3,
                max_tokens=new_tokens[number % len(new_tokens)],
                priority=number % 2,
            )
            generations.append(own.add(prompt_of(number % 12), sampling))
        elif name == "cancel" and live:
            own.cancel(live[number % len(live)])
        elif name == "step":
            own.step(1 + number % 4)
        elif name == "shape":
            own.shape = shapes[number % len(shapes)]
    own.finish([generation for generation in generations if not generation.done])
    for generation in generations:
        sampling, found = generation.sampling, generation.token_ids
        whole = dataclasses.replace(sampling, max_tokens=LONGEST, priority=0)
        text = alone(generation.prompt, whole, plain)[: sampling.max_tokens]
        if generation.finish_reason == "cancelled":
            text = text[: len(found)]
        assert found == text
    check_pages(own)


@given(history=histories(5, 40))
@settings(deadline=None, max_examples=5)
def test_each_text_is_the_one_it_has_alone(history: History):
    run_history(crowded("eagle3", "swap"), history, SHAPES[:2])


def check_300_histories(
    own: Engine, preemption: Preemption, plain: Callable[[], Engine] = plain_engine
) -> None:
    """Histories of many steps and long texts: about one request is preempted in each, and pages of
    earlier requests are reused all the time."""

    @given(history=histories(15, 60))
    @settings(deadline=None, max_examples=300)
    def run(history: History) -> None:
        run_history(own, history, plain=plain, new_tokens=LONG)

    before = own.scheduler.preemptions[preemption]
    run()
    preempted = own.scheduler.preemptions[preemption] - before
    print(f"{preempted} preemptions")  # shown with -rP
    assert preempted > 100


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "suffix", "suffix mixed"])
def test_of_300_histories_each_text_is_the_one_it_has_alone(drafter: str, preemption: Preemption):
    check_300_histories(crowded(drafter, preemption), preemption)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("drafter", ["dflash", "dspark", "ngram+dflash", "ngram+dspark"])
def test_of_300_histories_with_block_heads_each_text_is_the_one_it_has_alone(
    drafter: str, preemption: Preemption
):
    own = crowded_blocks(drafter, preemption)
    check_300_histories(own, preemption, plain_blocks_engine)
