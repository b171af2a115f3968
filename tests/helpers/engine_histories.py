"""Engines with too few pages, and requests added, cancelled and stepped in any order."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from tests.helpers.engines import LENGTH, plain_engine, ready_engine
from tests.helpers.random_models import random_prompts

SHAPES = (None, PLAIN, TreeShape(2, 1))
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


@functools.cache
def crowded(drafter: str, preemption: str) -> Engine:
    """An engine that has too few pages for its rows."""
    return ready_engine(drafter, num_pages=14, max_rows=3, preemption=preemption)


@functools.cache
def alone(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    plain: Callable[[], Engine] = plain_engine,
) -> list[int]:
    """A request's text without speculation, on an engine of one row."""
    generation = plain().add(prompt, sampling)
    plain().finish([generation])
    return generation.token_ids


def check_pages(own: Engine) -> None:
    """No request is left, and every page is free, or kept for others."""
    own._drain()
    usage = own.scheduler.usage()
    assert own.is_idle and usage.free + usage.idle == usage.total
