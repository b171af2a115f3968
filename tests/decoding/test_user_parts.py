"""A user's drafters and acceptance rules: a memory is kept, and mistakes are errors that name the
method."""

import dataclasses
import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from jaxspec import EngineParams, SpeculationConfig, admit, decode, init_state, prefill
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import DraftState, MixedDrafter, NGramDrafter, StatelessDrafter
from jaxspec.decoding.drafters.checks import check_drafter
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import make_chain
from jaxspec.engine.engine import Engine
from jaxspec.functional import catch_up
from jaxspec.parallel.placement import in_place_of
from jaxspec.parallel.pytree import Pytree, array, pytree
from tests.helpers.engines import plain_engine
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import eagle3_head, make_params, random_target

CHAIN = SpeculationConfig.chain(2)


@pytree
class Memory(Pytree):
    last: Array = array("batch")


@pytree
class Repeats(StatelessDrafter):
    """Drafts the token that was the root of the last round, which it remembers."""

    def init_rows(self, num_rows: int, target: Any, capacity: Any) -> Memory:
        return Memory(last=jnp.zeros(num_rows, jnp.int32))

    def propose(self, target: Any, state: Any, options: Any) -> Any:
        memory = state.rows.draft
        chain = jnp.stack(
            [state.rows.roots] + [memory.last] * options.speculation.max_depth, axis=1
        )
        size = jnp.full(len(memory.last), options.speculation.num_nodes)
        return make_chain(chain, size), DraftState(rows=memory)

    def commit(self, state: Any, features: Any, path: Any, counts: Any, options: Any) -> DraftState:
        return DraftState(rows=Memory(last=state.rows.roots))


@pytree
class ForgetsItsRows(Repeats):
    def commit(self, state: Any, features: Any, path: Any, counts: Any, options: Any) -> DraftState:
        return DraftState()


@pytree
class ChangesTheDtype(Repeats):
    def prefill(
        self, target: Any, state: Any, chunk: Any, features: Any, options: Any
    ) -> DraftState:
        return DraftState(rows=Memory(last=state.rows.draft.last.astype(jnp.float32)))


@pytree
class ReturnsOnlyATree(Repeats):
    def propose(self, target: Any, state: Any, options: Any) -> Any:
        return super().propose(target, state, options)[0]


@pytree
class SwapsTreeAndState(Repeats):
    def propose(self, target: Any, state: Any, options: Any) -> Any:
        return super().propose(target, state, options)[::-1]


@pytree
class ProposesTooMuch(Repeats):
    def propose(self, target: Any, state: Any, options: Any) -> Any:
        rows, size = state.rows, options.speculation.num_nodes + 1
        tokens = jnp.tile(rows.roots[:, None], (1, size))
        return make_chain(tokens, jnp.full(len(tokens), size)), DraftState(rows=rows.draft)


@pytree
class ReturnsNothing(Repeats):
    def catch_up(self, target: Any, state: Any, options: Any) -> Any:
        return None


@pytree
class HasPagesOnly(Repeats):
    def reset(self, pool: Any, rows: Any) -> Any:
        return {"pages": rows}


@pytree
class OneForAllRows(Repeats):
    def init_rows(self, num_rows: int, target: Any, capacity: Any) -> Memory:
        return Memory(last=jnp.zeros((), jnp.int32))


@pytree
class CapturesTooMuch(Repeats):
    @property
    def capture(self) -> tuple[int, ...]:
        return (99,)


@pytree
class TellsConfidence(Repeats):
    @property
    def tells_confidence(self) -> bool:
        return True


@pytree
class AlwaysConfident(Repeats):
    def propose(self, target: Any, state: Any, options: Any) -> Any:
        tree, draft = super().propose(target, state, options)
        return tree.replace(confidence=jnp.ones((2, 2))), draft


class NoPytree(StatelessDrafter):
    propose = Repeats.propose


@pytree
class HalfADrafter(Pytree):
    def propose(self, target: Any, state: Any, options: Any) -> Any: ...

    def prefill(self, target: Any, state: Any, chunk: Any, features: Any, options: Any) -> Any: ...


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def round_and_catch_up(params: EngineParams) -> tuple[Array, EngineState]:
    """The roots before a round of the first of two rows, and the state after it."""
    state = init_state(params, num_rows=2, max_length=24)
    state = admit(params, state, [0], jnp.array([[71, 10, 79]]), [3])
    state, _ = prefill(params, state, width=4)
    after, _ = decode(params, state, 1, [0])
    return state.rows.roots, catch_up(params, after, [0])


def with_drafter(drafter: Any) -> EngineParams:
    return make_params("none", SpeculationConfig.chain(0)).replace(
        drafter=drafter, speculation=CHAIN
    )


def test_a_memory_is_kept_by_the_methods_that_do_not_change_it():
    roots, state = round_and_catch_up(with_drafter(Repeats()))
    assert state.rows.draft.last.tolist() == [roots[0], 0]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"num_pages": 11}, {"adaptive": True}], ids=str)
def test_a_memory_is_kept_by_engines(config: dict[str, Any]):
    """One with few pages, where rows are preempted, and one that changes its trees."""
    cache = CacheConfig(page_size=8, max_length=64, num_pages=config.pop("num_pages", None))
    options = EngineConfig(max_rows=2, rounds_per_call=4, **config)
    engine = Engine(with_drafter(Repeats()), cache, options)
    prompts, sampling = [[71, 10, 79], [5, 6]], SamplingParams(temperature=1.0, max_tokens=56)
    asked = [dataclasses.replace(sampling, seed=seed) for seed in (0, 1)]
    generations = engine.add_all(prompts, asked)
    engine.finish(generations)
    preempted = sum(generation.preemptions for generation in generations)
    assert (preempted > 0) == (cache.num_pages is not None)
    for prompt, own, generation in zip(prompts, asked, generations, strict=True):
        assert generation.error is None and len(generation.token_ids) == 56
        plain = plain_engine().add(prompt, own)
        plain_engine().finish([plain])
        assert generation.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (ForgetsItsRows(), r"ForgetsItsRows.commit .* rows were Memory\(int32\[1\]\), got None"),
        (ChangesTheDtype(), r"ChangesTheDtype.prefill .* rows.last was int32\[2\], got float32"),
        (ReturnsOnlyATree(), r"ReturnsOnlyATree.propose must return a DraftTree and a DraftState"),
        (SwapsTreeAndState(), r"SwapsTreeAndState.propose must return a DraftTree first"),
        (
            ProposesTooMuch(),
            r"ProposesTooMuch proposed a tree of 4 nodes and depth 3, but the call takes at most 3",
        ),
        (ReturnsNothing(), r"ReturnsNothing.catch_up must return a DraftState, got None"),
        (HasPagesOnly(), r"HasPagesOnly.reset .* pool were None, got dict\(int32\[1\]\)"),
        (CapturesTooMuch(), r"CapturesTooMuch.capture is \(99,\): the target has hidden states 0 "),
        (OneForAllRows(), r"OneForAllRows.init_rows .* each of 2 rows: rows.last is int32\[\]"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_method_that_returns_something_else_is_named(drafter: Any, expected: str):
    with pytest.raises(ValueError, match=expected) as error:
        round_and_catch_up(with_drafter(drafter))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (NGramDrafter, "drafter is the class NGramDrafter: give an object, NGramDrafter()"),
        (cast(Any, StatelessDrafter)(), "drafter StatelessDrafter has no propose: "),
        (HalfADrafter(), "drafter HalfADrafter has no capture, num_reread_tokens, past_tokens, "),
        (NoPytree(), "drafter NoPytree is no pytree: "),
        (
            MixedDrafter(model=cast(Any, NGramDrafter)),
            "drafter MixedDrafter.model is the class ",
        ),
        (
            MixedDrafter(model=cast(Any, HalfADrafter())),
            "model of MixedDrafter HalfADrafter has no ",
        ),
        (7, "subclass of StatelessDrafter that writes propose, got int"),
        (eagle3_head(random_target()), "a draft head: give EagleDrafter(head=...)"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_is_no_drafter_is_refused_before_anything_runs(drafter: Any, expected: str):
    with pytest.raises(ValueError, match=re.escape(expected)):
        init_state(with_drafter(drafter), num_rows=1, max_length=24)


def decoded(params: EngineParams, confidence: bool) -> Any:
    """The shapes of what a round emits."""

    def run(params: EngineParams) -> Any:
        return decode(params, init_state(params, 2, 24), 1, confidence=confidence)[1]

    return jax.eval_shape(run, params)


def test_a_confidence_is_emitted_only_if_it_is_asked_for_and_told():
    assert decoded(with_drafter(AlwaysConfident()), confidence=False).confidence is None
    with pytest.raises(ValueError, match=r"TellsConfidence.propose .* confidence of \[2, 2\]"):
        decoded(with_drafter(TellsConfidence()), confidence=True)


@pytest.mark.parametrize("drafter", [NGramDrafter, None, Repeats(), "ngram"], ids=str)
def test_a_drafter_of_another_kind_does_not_take_the_place_of_one(drafter: Any):
    with pytest.raises(ValueError, match="other shapes or static fields"):
        in_place_of(NGramDrafter(), drafter)


@pytest.mark.parametrize(
    ("mixed", "expected"),
    [
        (MixedDrafter(model=Repeats(), lookup=Repeats()), "must keep no state, and Repeats has"),
        (MixedDrafter(model=ReturnsNothing()), "ReturnsNothing.catch_up must return a DraftState"),
    ],
    ids=["lookup with rows", "model returns nothing"],
)
def test_the_parts_of_a_mixed_drafter_are_checked(mixed: Any, expected: str):
    with pytest.raises(ValueError, match=expected):
        round_and_catch_up(with_drafter(mixed))


def test_every_drafter_of_jaxspec_is_one():
    for name in ("none", "suffix mixed", "eagle1", "mtp3", "draft_model"):
        check_drafter(make_params(name, CHAIN).drafter)


@dataclasses.dataclass(frozen=True)
class Rule:
    allowed: Any = ("top_k",)
    accepted: Any = None

    def proposals(self, is_chain: bool) -> Any:
        return self.allowed

    def accept(self, verified: Any) -> Any:
        return self.accepted


class HalfARule:
    def proposals(self, is_chain: bool) -> Any: ...


class Unhashable(Rule):
    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (["match"], "acceptance must be match, rejection or an object with the methods proposals "),
        (object(), "acceptance must be match, rejection or an object with the methods proposals "),
        (Rule, "acceptance is the class Rule: give an object, Rule()"),
        (HalfARule(), "acceptance rule HalfARule has no method accept"),
        (Unhashable(), "acceptance rule Unhashable cannot be hashed"),
        (Rule(allowed="top_k"), "Rule.proposals must return a tuple of top_k, coupled, sampled"),
        (Rule(allowed=()), "Rule.proposals must return a tuple of top_k, coupled, sampled"),
        ("mach", "acceptance must be match, rejection or a rule of your own, got 'mach'"),
    ],
    ids=["list", "object", "class", "half", "unhashable", "unknown", "none", "typo"],
)
def test_what_is_no_acceptance_rule_is_refused(rule: Any, expected: str):
    with pytest.raises(ValueError, match=re.escape(expected)):
        SpeculationConfig.chain(2, acceptance=rule)


def test_a_rule_that_accepts_nothing_readable_is_named():
    speculation = SpeculationConfig.chain(2, acceptance=Rule())
    params = with_drafter(Repeats()).replace(speculation=speculation)
    with pytest.raises(ValueError, match=r"Rule.accept must return an Accepted, got NoneType"):
        round_and_catch_up(params)


def test_a_chain_of_too_many_nodes_is_told_what_fits():
    with pytest.raises(ValueError, match=r"num_nodes 8 and max_depth 3 .* has 4 nodes, the root"):
        SpeculationConfig(8, 3)
