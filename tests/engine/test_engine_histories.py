"""Many histories of requests, of every drafter; test_engine.py runs a few by default."""

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from jaxspec.config.engine import Preemption
from jaxspec.engine.engine import Engine
from tests.decoding.test_block_exactness import engine_of, plain_params
from tests.helpers.block_heads import block_params
from tests.helpers.engine_histories import LONG, History, crowded, histories, run_history
from tests.helpers.engines import CHAIN, plain_engine
from tests.helpers.random_models import DRAFTERS


@functools.cache
def crowded_blocks(drafter: str, preemption: Preemption) -> Engine:
    """A crowded engine with a block head, and a target of its own."""
    return engine_of(block_params(drafter, CHAIN), num_pages=14, max_rows=3, preemption=preemption)


@functools.cache
def plain_blocks_engine() -> Engine:
    return engine_of(plain_params(), max_rows=1, prefix_caching=False)


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
