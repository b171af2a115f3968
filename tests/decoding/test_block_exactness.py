"""Block drafters change how fast the text comes, never the text: token for token, float32."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.functional import EngineParams
from tests.decoding.test_exactness import PROMPTS, TREES, Case, check, sampling_of
from tests.helpers.block_heads import CORRECTED, KINDS, OTHERS, block_params, block_target
from tests.helpers.engines import seal
from tests.helpers.marks import slow
from tests.helpers.random_models import generate

SAMPLED = 0.8


DRAFTERS = ("dflash", "dspark", "ngram+dflash", "ngram+dspark")
WITH_SUFFIXES = ("suffix+dflash", "suffix+dspark")
ALL_KINDS = (*KINDS, *CORRECTED, *OTHERS)
# A tree that is deeper than a page is long, and the trees and chains of the other drafters.
OWN_TREES = {name: TREES[name] for name in ("chain5", "tree12")} | {
    "tree40": SpeculationConfig(num_nodes=40, max_depth=5, top_k=8)
}
CHOICES = [
    (DRAFTERS, tuple(OWN_TREES), (1, 5, 16), (3, 8), (0.0, SAMPLED)),
    (KINDS, tuple(OWN_TREES), (4, 64), (1,), (1.0,)),
    (WITH_SUFFIXES, tuple(OWN_TREES), (4, 64), (3,), (0.0, 1.0)),
    (CORRECTED, tuple(OWN_TREES), (5,), (3,), (0.0, SAMPLED)),
    (OTHERS, ("chain5", "tree12"), (4, 16), (3,), (0.0, SAMPLED)),
    (CORRECTED, ("tree12",), (1, 64), (1, 8), (SAMPLED,)),
    (OTHERS, ("tree12",), (1,), (1, 8), (SAMPLED,)),
]
ALL_CASES = [Case(*choice) for choices in CHOICES for choice in itertools.product(*choices)]
# The slow cases are all others. DFlash trees by default: the requests of an engine below.
FAST = Case("dspark", "chain5", 5, 3, SAMPLED)
FAST_CASES = [FAST, FAST._replace(temperature=1.0)]  # of the same programs
SLOW = slow(Case("dflash", "tree12", 5, 3, SAMPLED))


@functools.cache
def plain_params() -> EngineParams:
    plain = SpeculationConfig.chain(1)
    return EngineParams(target=block_target(), drafter=NoDrafter(), speculation=plain)


@functools.cache
def plain_texts(temperature: float, batch: int = 3) -> list[list[int]]:
    """The first prompts, decoded one token a round."""
    return generate(plain_params(), PROMPTS[:batch], sampling=sampling_of(temperature, batch))[0]


def run(case: Case, **options: Any):
    return generate(
        block_params(case.drafter, OWN_TREES[case.tree]),
        PROMPTS[: case.batch],
        page_size=case.page_size,
        sampling=sampling_of(case.temperature, case.batch),
        **options,
    )


@pytest.mark.parametrize(
    "case", [*FAST_CASES, *(slow(c) for c in ALL_CASES if c not in FAST_CASES)], ids=str
)
def test_text_is_that_of_plain_decoding(case: Case):
    check(case, block_params(case.drafter, OWN_TREES[case.tree]))


@pytest.mark.parametrize("case", [FAST, SLOW], ids=str)
def test_prompts_may_be_read_in_chunks(case: Case):
    whole, whole_state = run(case)
    for chunk in (1, 7):
        parts, state = run(case, chunk=chunk)
        assert parts == whole
        same = jnp.array_equal(state.rows.stats.accepted, whole_state.rows.stats.accepted)
        assert same, "the same text, but the drafter guessed differently"


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain5", "tree12"])
def test_smaller_trees_run_shorter_blocks(tree: str):
    """And plain rounds in between leave the drafter's pages complete."""
    for shape in (SpeculationConfig.chain(2).shape, SpeculationConfig.chain(0).shape):
        generated, _ = run(Case("dflash", tree, 5, 3, SAMPLED), shape=shape)
        assert generated == plain_texts(SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize("tree", OWN_TREES)
@pytest.mark.parametrize("drafter", [*DRAFTERS, *WITH_SUFFIXES, *CORRECTED, "reduced dflash"])
def test_rejection_at_temperature_0_is_greedy(drafter: str, tree: str):
    """The last row samples, so that nothing of sampling is left out."""
    rejecting = dataclasses.replace(OWN_TREES[tree], acceptance="rejection")
    sampling = sampling_of(0.0, 3).replace(temperature=jnp.array([0.0, 0.0, SAMPLED]))
    generated, state = generate(block_params(drafter, rejecting), PROMPTS[:3], sampling=sampling)
    assert generated[:2] == plain_texts(0.0)[:2]
    assert state.rows.stats.accepted.sum() > 1.2 * state.rows.stats.rounds.sum()


def test_trees_deeper_than_a_block():
    params = block_params("dflash", SpeculationConfig.chain(6))
    with pytest.raises(ValueError, match="writes 5 tokens at once, and the draft tree has a max"):
        generate(params, PROMPTS[:1])


# Requests of an engine: prompts that begin alike, and too few pages.

REQUESTS = [prompt[:20].tolist() for prompt in PROMPTS[2:6]]
REQUESTS += [[*REQUESTS[0], 7, 8], [*REQUESTS[0], 9]]
SAMPLINGS = [SamplingParams(SAMPLED * (i % 2), seed=i, max_tokens=30) for i in range(6)]


def engine_of(
    params: EngineParams,
    num_pages: int | None = None,
    *,
    page_size: int = 8,
    sealed: bool = True,
    **options: Any,
) -> Engine:
    cache = CacheConfig(page_size=page_size, max_length=64, num_pages=num_pages)
    options = {"rounds_per_call": 4, "max_rows": 4} | options
    own = Engine(params, cache, EngineConfig(**options))
    return seal(own, prompt_tokens=22) if sealed else own


def finished(own: Engine) -> list[Generation]:
    """The requests, those that begin alike after the others."""
    early = own.add_all(REQUESTS[:4], SAMPLINGS[:4])
    own.finish(early)
    late = own.add_all(REQUESTS[4:], SAMPLINGS[4:])
    own.finish(late)
    return [*early, *late]


@functools.cache
def plain_requests() -> list[list[int]]:
    own = engine_of(plain_params(), max_rows=1, prefix_caching=False)
    return [generation.token_ids for generation in finished(own)]


@pytest.mark.parametrize(
    ("drafter", "tree", "preemption", "page_size"),
    [
        # By default: block heads in the tests above, lost pages of an engine in test_engine.py.
        slow("dflash", "chain5", "swap", 8),
        slow("dflash", "tree12", "swap", 8),
        slow("dflash", "tree12", "recompute", 8),
        slow("dspark", "tree12", "swap", 8),
        slow("dspark", "tree12", "recompute", 4),
        slow("dflash", "chain5", "swap", 4),
        slow("dspark", "chain5", "recompute", 8),
        slow("ngram+dflash", "chain5", "recompute", 8),
        slow("ngram+dspark", "tree12", "swap", 4),
        slow("suffix+dflash", "tree12", "recompute", 4),
        slow("suffix+dspark", "chain5", "swap", 8),
        slow("windowed", "tree12", "swap", 4),
        slow("reduced dspark", "chain5", "recompute", 8),
        slow("reduced dflash", "tree12", "swap", 4),
        slow("causal", "tree12", "recompute", 8),
        slow("mimo", "chain5", "swap", 4),
        slow("gated", "chain5", "recompute", 4),
        slow("rnn", "tree12", "swap", 8),
        slow("domino", "tree12", "recompute", 4),
        slow("xpress", "chain5", "swap", 4),
        slow("xpress", "tree12", "recompute", 8),
        slow("lilicorr", "chain5", "recompute", 4),
        slow("lilicorr", "tree12", "swap", 8),
        slow("dflash2", "chain5", "swap", 8),
        slow("dflash2", "tree12", "recompute", 4),
    ],
)
def test_prefix_hits_and_preemption_do_not_change_the_text(
    drafter: str, tree: str, preemption: Any, page_size: int
):
    params = block_params(drafter, OWN_TREES[tree])
    few = 14 * 8 // page_size
    own = engine_of(params, num_pages=few, preemption=preemption, page_size=page_size)
    generations = finished(own)
    again = own.add_all(REQUESTS[4:], SAMPLINGS[4:])
    own.finish(again)
    texts = [generation.token_ids for generation in (*generations, *again)]
    assert texts == plain_requests() + plain_requests()[4:]
    assert own.scheduler.preemptions[preemption] > 0
    assert all(generation.cached_tokens >= 8 for generation in again)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ALL_KINDS)
def test_a_prefix_hit_drafts_as_if_it_had_read_the_prompt(drafter: str):
    """The drafter's pages of a prefix are all that it needs of it."""
    params = block_params(drafter, OWN_TREES["chain5"])
    rounds = []
    for caching in (True, False):
        own = engine_of(params, prefix_caching=caching)
        late = finished(own)[4:]
        rounds.append([(one.token_ids, one.statistics.rounds) for one in late])
        assert (late[0].cached_tokens > 0) == caching
    assert rounds[0] == rounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"adaptive": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("drafter", ALL_KINDS)
def test_engines_of_other_kinds_do_not_change_the_text(drafter: str, options: dict[str, Any]):
    own = engine_of(block_params(drafter, OWN_TREES["chain5"]), sealed=False, **options)
    assert [generation.token_ids for generation in finished(own)] == plain_requests()
