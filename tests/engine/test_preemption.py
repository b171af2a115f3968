"""An engine swaps or recomputes by what it has measured, and keeps to its host memory."""

import functools
import re
from typing import Any

import numpy as np
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.plans.host_copies import part_bytes
from tests.helpers.engines import FEW, FULL, LENGTH, SAMPLED, new_engine, seal
from tests.helpers.random_models import random_prompts, random_target
from tests.helpers.sampling_reference import reference_texts

PROMPTS = [prompt.tolist() for prompt in random_prompts((20, 9, 14, 3, 25, 11), seed=3)]
SAMPLING = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=30) for i in range(len(PROMPTS))]


@functools.cache
def expected() -> list[list[int]]:
    """Texts of plain decoding."""
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS]
    texts = reference_texts(random_target(), prompts, SAMPLING, LENGTH)
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


def run(own: Engine) -> list[Generation]:
    generations = own.add_all(PROMPTS, SAMPLING)
    own.finish(generations)
    assert [generation.token_ids for generation in generations] == expected()
    own._drain()
    assert own.swapped_bytes == 0 == own.scheduler.host.parts
    return generations


def test_the_first_swap_measures_and_later_ones_follow_the_costs():
    own = new_engine(num_pages=FEW)
    costs = own.preemption_costs
    assert costs.swap_part is None
    seal(own, FULL)  # the programs of the tests of options
    run(own)
    assert costs.swap_part is not None and 0 < costs.swap_part < 10
    swaps = own.scheduler.preemptions["swap"]
    assert swaps > 0
    costs.add_reading(1, 1e-9)
    costs.add_swap(1000, 1e9)
    for _ in range(200):  # nothing of what was measured counts any more
        costs.add_reading(1000, 1e-9)
    run(own)
    assert own.scheduler.preemptions["recompute"] > 0
    assert own.scheduler.preemptions["swap"] == swaps


@pytest.mark.slow
def test_warm_up_measures_both_costs_and_compiles_nothing_more():
    own = new_engine(num_pages=FEW)
    own.warm_up([SAMPLED], rows=[4])
    costs, compiled = own.preemption_costs, own.programs.compiled
    token, part = costs.recompute_token, costs.swap_part
    assert token is not None and part is not None
    assert 0 < token < 10 and 0 < part < 10
    run(own)
    assert sum(own.scheduler.preemptions.values()) > 0
    assert own.programs.compiled == compiled


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_warm_up_measures_nothing_where_nothing_is_chosen(preemption: Any):
    own = new_engine(num_pages=FEW, preemption=preemption)
    own.warm_up([SAMPLED], rows=[4])
    assert own.preemption_costs.recompute_token is None


def part_of(own: Engine) -> int:
    return part_bytes(own.params, own.programs.sizes)


@pytest.mark.parametrize("parts", [0, 1])
def test_requests_that_do_not_fit_host_memory_are_recomputed(parts: int):
    size = part_of(new_engine(num_pages=FEW, preemption="swap"))
    own = seal(
        new_engine(num_pages=FEW, preemption="swap", swap_memory=(parts + 0.5) * size / 2**30),
        FULL,
    )
    generations, used = own.add_all(PROMPTS, SAMPLING), {0}
    while not all(generation.done for generation in generations):
        own.step()
        used.add(own.swapped_bytes)
    assert [generation.token_ids for generation in generations] == expected()
    assert used == {0, parts * size}
    assert own.scheduler.preemptions["recompute"] > 0
    assert (own.scheduler.preemptions["swap"] > 0) == (parts > 0)


@pytest.mark.slow
def test_long_rows_are_moved_in_parts():
    own = new_engine(num_pages=100, max_length=512, max_rows=2)
    assert own.programs.sizes.part_pages == 256 // 8
    prompts = [prompt.tolist() for prompt in random_prompts((330, 300), seed=5)]
    sampling = [SamplingParams(0.8, seed=i, max_tokens=100) for i in range(2)]
    alone = []
    for prompt, params in zip(prompts, sampling, strict=True):
        alone.append(own.add(prompt, params))
        own.finish(alone[-1:])
    generations, most = own.add_all(prompts, sampling), 0
    while not all(generation.done for generation in generations):
        own.step()
        most = max(most, own.scheduler.host.parts)
    assert most == 2 and own.scheduler.preemptions["swap"] > 0
    assert [one.token_ids for one in generations] == [one.token_ids for one in alone]


def test_bad_amounts_of_host_memory_are_refused():
    for value in (-1, float("nan"), float("inf"), "4", True):
        with pytest.raises(ValueError, match=f"swap_memory must be GiB.*{re.escape(repr(value))}"):
            new_engine(swap_memory=value)
