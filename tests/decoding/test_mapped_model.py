"""A draft model whose ids are not the target's."""

import pytest

from jaxspec.config.engine import Preemption
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import DraftModelDrafter
from jaxspec.functional import EngineParams
from tests.decoding.test_block_exactness import (
    REQUESTS,
    SAMPLINGS,
    engine_of,
    finished,
    plain_requests,
)
from tests.decoding.test_exactness import TREES, Case, check
from tests.helpers.block_heads import block_target
from tests.helpers.engines import sampled_texts
from tests.helpers.mapped_models import mapped_copy
from tests.helpers.random_models import random_target


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_texts_are_those_of_the_same_model_with_the_targets_ids(acceptance: str):
    target = random_target()
    spec = SpeculationConfig.chain(2, acceptance)
    texts = [
        sampled_texts(EngineParams(target=target, drafter=drafter, speculation=spec))
        for drafter in (mapped_copy(target), DraftModelDrafter(model=target))
    ]
    if acceptance == "match":
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("mapped", tree, page_size, batch, temperature)
        for tree in ("chain5", "tree12")
        for page_size, batch, temperature in ((1, 8, 0.8), (16, 1, 0.0))
    ],
    ids=str,
)
def test_text_is_that_of_plain_decoding(case: Case):
    target = random_target()
    spec = TREES[case.tree]
    check(case, EngineParams(target=target, drafter=mapped_copy(target), speculation=spec))


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_prefix_hits_and_preemption_do_not_change_the_text(preemption: Preemption):
    target = block_target()
    params = EngineParams(
        target=target, drafter=mapped_copy(target), speculation=SpeculationConfig.parse("12:3:3")
    )
    engine = engine_of(params, num_pages=14, preemption=preemption)
    generations = finished(engine)
    assert [one.token_ids for one in generations] == plain_requests()
    assert engine.scheduler.preemptions[preemption] > 0
    again = engine.add_all(REQUESTS[4:], SAMPLINGS[4:])
    engine.finish(again)
    assert [one.token_ids for one in again] == plain_requests()[4:]
    assert all(one.cached_tokens >= 8 for one in again)
