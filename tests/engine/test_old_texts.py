"""Old texts as drafts of requests, and repair as the weights change: texts stay those of fresh
requests."""

import dataclasses
import functools
from typing import Any

import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import make_mesh
from tests.decoding.functional.test_verify_prefix import recurrent_target
from tests.helpers.engines import new_engine, ready_engine
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params, noisy, random_prompts

NEW = 40
PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 17, 1, 9, 12, 3), seed=4)]
SAMPLING = [
    SamplingParams(temperature=0.8 * (index % 3 > 0), seed=index, max_tokens=NEW)
    for index in range(len(PROMPTS))
]


@functools.cache
def engine() -> Engine:
    return ready_engine("ngram")


@functools.cache
def other_target(noise: float) -> Decoder:
    return noisy(old_target(), noise)


@functools.cache
def old_target() -> Decoder:
    return engine().params.target


def start(own: Engine, sampling: list[SamplingParams] = SAMPLING) -> list[Generation]:
    """Six requests, and two samples of a prompt; the engine has four rows."""
    both = dataclasses.replace(SAMPLING[1], n=2, seed=50)
    return own.add_all([*PROMPTS, PROMPTS[1]], [*sampling, both])


def fresh(
    own: Engine, target: Decoder, sampling: list[SamplingParams] = SAMPLING
) -> list[list[int]]:
    own.use_target(target)
    own.finish(generations := start(own, sampling))
    assert not any(each.error for each in generations)
    return [each.token_ids for each in generations]


def test_drafts_change_no_text() -> None:
    own = engine()
    texts = fresh(own, old_target())
    right, wrong = texts[0], [*texts[1][:20], (texts[1][20] + 1) % 96, *texts[1][21:]]
    drafts = [right, wrong, [], texts[3][:7], [1], [*texts[5], 4, 4], texts[6], texts[6]]
    for _ in range(2):
        both = dataclasses.replace(SAMPLING[1], n=2, seed=50)
        compiled = own.programs.compiled
        generations = own.add_all([*PROMPTS, PROMPTS[1]], [*SAMPLING, both], drafts=drafts)
        own.finish(generations)
        assert [each.token_ids for each in generations] == texts
        kept = [each.kept_tokens for each in generations]
        assert kept[:4] == [NEW - 1, 20, 0, 7] and kept[5:7] == [NEW - 1] * 2 and kept[7] < NEW - 1
        own.forget_texts()
    assert own.programs.compiled == compiled  # the second time


def test_repaired_texts_are_those_of_fresh_requests() -> None:
    own = engine()
    for noise, steps in ((0.0, 6), (0.003, 5), (0.03, 3), (0.0, 1), (0.0, 0)):
        target = other_target(noise)
        expected = fresh(own, target)
        own.use_target(old_target())
        generations = start(own)
        for _ in range(steps):
            own.step()
        compiled = own.programs.compiled
        own.use_target(target, in_flight="repair")
        own.finish(generations)
        assert [each.token_ids for each in generations] == expected
        assert {each.version for each in generations} <= {own.version - 1, own.version}
        begun = [each for each in generations if each.restarts]
        assert len(begun) >= 4 * (steps > 0)
        if noise == 0.0 and steps == 6:
            assert sum(each.kept_tokens for each in begun) > 20
        elif noise == 0.003:
            assert own.programs.compiled == compiled
            assert sum(each.kept_tokens for each in begun) > 0


@pytest.mark.slow
def test_nothing_compiles_for_a_repair_after_a_warm_up() -> None:
    own = new_engine("ngram")
    own.warm_up(SAMPLING[:2], tokens=60, old_texts=True)
    generations = start(own)
    for _ in range(4):
        own.step()
    compiled = own.programs.compiled
    own.use_target(other_target(0.003), in_flight="repair")
    own.finish(generations)
    assert sum(each.kept_tokens for each in generations) > 0
    assert own.programs.compiled == compiled


def test_old_texts_that_cannot_be_verified_are_not_warmed_up() -> None:
    structured = SamplingParams(structured=StructuredOutput(json_object=True))
    with pytest.raises(ValueError, match="old_texts cannot be warmed up: the host restricts"):
        engine().warm_up([*SAMPLING[:1], structured], old_texts=True)


def test_weights_that_change_twice_repair_what_is_left_of_a_draft() -> None:
    own = engine()
    expected = fresh(own, other_target(0.003))
    own.use_target(old_target())
    generations = start(own)
    for _ in range(6):
        own.step()
    for target in (other_target(0.0), other_target(0.003)):
        own.use_target(target, in_flight="repair")
        own.step()
    own.finish(generations)
    assert [each.token_ids for each in generations] == expected
    assert max(each.restarts for each in generations) == 2


@pytest.mark.parametrize(
    ("draft", "changes", "message"),
    [
        ([96], {}, "draft 0 has token 96: ids are 0 to 95"),
        ([1], {"structured": StructuredOutput(json_object=True)}, "restricts each token"),
    ],
)
def test_drafts_that_cannot_be_used_are_refused(draft, changes, message: str) -> None:
    sampling = dataclasses.replace(SAMPLING[0], **changes)
    with pytest.raises(ValueError, match=message):
        engine().add(PROMPTS[0], sampling, draft=draft)
    with pytest.raises(ValueError, match="there are 1 drafts for 2 texts"):
        engine().add_all(PROMPTS[:2], SAMPLING[:2], drafts=[[1]])


def full(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, logprobs=1, repetition_penalty=1.2, prompt_logprobs=0)


def policy(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, logprobs=0, policy_logprobs=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("eagle3", {"num_pages": 22}),  # preempted again and again
        ("mtp3", {"prefill_budget": 8}),
        ("suffix", {"prefix_caching": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("change", [dataclasses.replace, full, policy])
def test_repair_in_every_state(drafter: str, options: dict[str, Any], change: Any) -> None:
    own = new_engine(drafter, **options)
    old, new = own.params.target, noisy(own.params.target, 0.003)
    sampling = [change(each) for each in SAMPLING]
    expected = fresh(own, new, sampling)
    kept = preemptions = 0
    for steps in (1, 2, 4, 7, 11):
        own.use_target(old)
        generations = start(own, sampling)
        for _ in range(steps):
            own.step()
        own.use_target(new, in_flight="repair")
        own.finish(generations)
        assert [each.token_ids for each in generations] == expected
        kept += sum(each.kept_tokens for each in generations)
        preemptions += sum(own.scheduler.preemptions.values())
        for each in generations:
            scores = each.policy_logprobs
            assert scores is None or len(scores) == len(each.token_ids)
            assert each.logprobs is None or len(each.logprobs) == len(each.token_ids)
            assert each.prompt_logprobs is None or len(each.prompt_logprobs) == len(each.prompt)
    assert kept > 50
    assert preemptions or "num_pages" not in options


@pytest.mark.slow
def test_repair_of_recurrent_rows_with_snapshots() -> None:
    params = make_params("ngram", SpeculationConfig.chain(2), recurrent_target())
    own = Engine(params, CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=4))
    old, new = own.params.target, noisy(own.params.target, 0.003)
    expected = fresh(own, new)
    for steps in (1, 3, 6):
        own.use_target(old)
        generations = start(own)
        for _ in range(steps):
            own.step(4)
        own.use_target(new, in_flight="repair")
        own.finish(generations)
        assert [each.token_ids for each in generations] == expected
    assert sum(each.kept_tokens for each in generations) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "mtp3", "recurrent"])
def test_long_drafts_are_verified_in_several_calls(kind: str) -> None:
    target = recurrent_target() if kind == "recurrent" else None
    params = make_params("ngram" if target else kind, SpeculationConfig.chain(2), target)
    config = EngineConfig(max_rows=4, prefill_budget=64)  # a row is verified at a time
    own = Engine(params, CacheConfig(page_size=8, max_length=192), config)
    sampling = [dataclasses.replace(each, max_tokens=150) for each in SAMPLING[:4]]
    own.finish(first := own.add_all(PROMPTS[:4], sampling))
    texts = [each.token_ids for each in first]
    drafts = [[*text[:100], (text[100] + 1) % 96, *text[101:]] for text in texts]
    own.forget_texts()
    calls: list[int] = []
    own.on_read = lambda plan, _: calls.append(len(plan.verifies))
    own.finish(again := own.add_all(PROMPTS[:4], sampling, drafts=drafts))
    assert [each.token_ids for each in again] == texts
    assert [each.kept_tokens for each in again] == [100] * 4
    assert max(calls) == 1 and sum(calls) == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"data_parallel": 2}], ids=str)
def test_repair_on_a_mesh(sizes: dict[str, Any]) -> None:
    params = make_params("eagle3", SpeculationConfig.chain(2))
    expected_of = Engine(params, CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=4))
    old, new = params.target, noisy(params.target, 0.003)
    expected = fresh(expected_of, new)
    mesh = make_mesh(**sizes)
    on_devices = [on_mesh(params.replace(target=each), mesh) for each in (old, new)]
    own = Engine(on_devices[0], CacheConfig(page_size=8, max_length=64), EngineConfig(max_rows=4))
    generations = start(own)
    for _ in range(5):
        own.step(4)
    own.use_target(on_devices[1].target, in_flight="repair")
    own.finish(generations)
    assert [each.token_ids for each in generations] == expected
    assert sum(each.kept_tokens for each in generations) > 10


def test_a_deterministic_engine_refuses_drafts() -> None:
    own = Engine(
        make_params("ngram", SpeculationConfig.chain(2)),
        CacheConfig(page_size=8, max_length=64),
        EngineConfig(max_rows=2, deterministic=True),
    )
    with pytest.raises(ValueError, match="draft 0 cannot be used: in deterministic mode"):
        own.add(PROMPTS[0], SAMPLING[0], draft=[1])
