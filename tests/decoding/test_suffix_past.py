"""Suffix drafting over past outputs: the ring against a list, trees, texts, and what is kept."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import LLM, functional
from jaxspec.checkpoints.load import load
from jaxspec.commands import generate
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import Drafter, MixedDrafter, NGramDrafter, SuffixDrafter
from jaxspec.decoding.drafters.matching import BLOCK, latest_places
from jaxspec.decoding.past_text import GAP, PastText, empty_past
from jaxspec.engine.engine import Engine
from jaxspec.engine.plans.past_outputs import BEFORE, PART, PastOutputs
from jaxspec.parallel import make_mesh
from tests.decoding.test_suffix import CHAIN, SIZE, TREE, propose
from tests.decoding.test_suffix import paths as paths_in
from tests.helpers.engines import LENGTH, plain_engine, seal
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    empty_state,
    make_drafter,
    make_params,
    random_prompts,
    random_target,
)

RING = 24  # tokens
Text = list[int]


# The ring.


class Ring:
    """In place of an engine's programs: writes to a ring alone."""

    add = staticmethod(jax.jit(PastText.with_more, compiler_options=FAST_COMPILE))

    def __init__(self, size: int):
        past = empty_past(size)
        assert past is not None
        self.past = past
        self.params = types.SimpleNamespace(drafter=SuffixDrafter(past=size))

    def remember(self, tokens: np.ndarray, count: int) -> None:
        self.past = self.add(self.past, tokens, np.int32(count))


def ring_of(texts: list[Text], size: int = RING) -> PastText:
    """A ring to which these texts were added, one after the other."""
    ring: Any = Ring(size)
    for text in texts:
        PastOutputs(ring).write(text)
    return ring.past


texts_of = functools.partial(st.lists, min_size=1, max_size=RING + 5)


@pytest.mark.parametrize("size", [1, RING, slow(PART + 50)])
@given(st.lists(texts_of(st.integers(0, 2)) | st.just([7] * PART), max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_ring_holds_the_last_tokens(size: int, texts: list[Text]):
    written = [token for text in texts for token in [*text, GAP][-size:]]
    wanted = [*[GAP] * size, *written][-size:]
    assert ring_of(texts, size).in_order.tolist() == wanted
    assert wanted[-1] == GAP


@given(st.data(), st.sampled_from([1, 3]), st.sampled_from([5, 2 * BLOCK, 9 * BLOCK + 7]))
@settings(max_examples=30, deadline=None)
def test_the_latest_places_are_those_of_a_sort(data: st.DataObject, count: int, size: int):
    share = data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    found = np.random.default_rng(data.draw(st.integers(0, 99))).random((2, size)) < share
    for row, places in zip(found, latest_places(jnp.array(found), count).tolist(), strict=True):
        wanted = np.flatnonzero(row)[::-1][:count].tolist()
        assert places == [*wanted, *[-1] * (count - len(wanted))]


# Trees.


def paths(drafter: Drafter, shape: SpeculationConfig, text: Text, past: list[Text]) -> list[Text]:
    """Paths of the nodes that continue ``text``, root left out."""
    row = np.full((1, SIZE), 1, np.int32)
    row[0, : len(text)] = text
    tree = propose(drafter, shape, 1, SIZE)(row, np.array([len(text) - 1]), ring_of(past))
    assert (np.asarray(tree.tokens) >= 0).all()  # padding, too, is read by the model
    return [list(path) for path in paths_in(tree, 0)]


def longest_match(text: Text, other: Text, most: int, own: bool) -> int:
    """Tokens of the longest match of the last ones of ``text`` that another token follows."""
    for length in range(min(len(text), most), 0, -1):
        ends = range(length, len(other))
        if any(other[end - length : end] == text[-length:] for end in ends):
            return length
    return 0


DEFAULT = SuffixDrafter(past=RING, max_match=6, max_occurrences=5)
ALONE = DEFAULT.replace(past=0)


@given(texts_of(st.integers(0, 3)), st.lists(texts_of(st.integers(0, 3)), max_size=3))
@settings(max_examples=60, deadline=None)
def test_the_longer_match_drafts_and_of_equal_ones_the_own(text: Text, past: list[Text]):
    kept = [token for one in past for token in [*one, GAP][-RING:]][-RING:]
    pieces = split(kept)
    own = longest_match(text, text, 6, True)
    other = max((longest_match(text, piece, 6, False) for piece in pieces), default=0)
    drafted = paths(DEFAULT, CHAIN, text, past)
    if own >= other:
        assert drafted == paths(ALONE, CHAIN, text, [])
        return
    # A path, token by token what followed some of the occurrences of the match.
    followers = [
        piece[end:]
        for piece in pieces
        for end in range(other, len(piece))
        if piece[end - other : end] == text[-other:]
    ]
    assert 1 <= len(drafted) <= other
    for path in drafted:
        assert any(one[: len(path)] == path for one in followers)


def split(tokens: Text) -> list[Text]:
    """The texts between gaps."""
    pieces: list[Text] = [[]]
    for token in tokens:
        pieces.append([]) if token == GAP else pieces[-1].append(token)
    return pieces


def test_a_match_neither_crosses_texts_nor_drafts_beyond_one():
    past = [[1, 2, 3], [4, 5, 6, 7]]
    assert paths(DEFAULT, CHAIN, [9, 2, 3], past) == []  # nothing followed
    assert paths(DEFAULT, CHAIN, [3, 4], past) == [[5]]  # a match of one token, not of two
    assert paths(DEFAULT, CHAIN, [8, 4, 5], past) == [[6], [6, 7]]
    deep = DEFAULT.replace(factor=9.0)
    assert paths(deep, CHAIN, [8, 4, 5], past) == [[6], [6, 7]]


def test_occurrences_in_past_outputs_vote():
    past = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    assert paths(DEFAULT, TREE, [9, 1, 2], past) == [[3], [6], [6, 7], [3, 5], [3, 4]]


# Texts, and what is kept.

PROMPTS = [prompt.tolist() for prompt in random_prompts((20, 9, 14, 3, 25, 11), seed=3)]
SAMPLING = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=30) for i in range(len(PROMPTS))]


def past_params(mixed: bool, speculation: SpeculationConfig, past: int = 512) -> Any:
    target = random_target()
    drafter: Drafter = SuffixDrafter(past=past)
    if mixed:
        model = make_drafter("eagle3", target)
        drafter = MixedDrafter(model=model, lookup=SuffixDrafter(min_match=2, past=past))
    return make_params("none", speculation, target).replace(drafter=drafter)


def past_engine(
    speculation: SpeculationConfig,
    *,
    mixed: bool = False,
    past: int = 512,
    num_pages: int | None = None,
    **options: Any,
) -> Engine:
    config = EngineConfig(rounds_per_call=4, max_rows=4, **options)
    cache = CacheConfig(page_size=8, max_length=LENGTH, num_pages=num_pages)
    return seal(Engine(past_params(mixed, speculation, past), cache, config))


def run(engine: Engine, sampling: list[SamplingParams]) -> tuple[list[Text], int]:
    """Texts, and the rounds they took."""
    generations = engine.add_all(PROMPTS[: len(sampling)], sampling)
    engine.finish(generations)
    rounds = sum(generation.statistics.rounds for generation in generations)
    return [generation.token_ids for generation in generations], rounds


def past_of(engine: Engine) -> Text:
    past = engine.programs.state.pool.past
    assert past is not None
    return past.in_order.tolist()


@pytest.mark.parametrize(
    ("mixed", "speculation", "preemption"),
    [
        slow(False, TREE, "recompute"),  # tests/real/test_smollm2.py is quicker
        slow(False, CHAIN, "swap"),
        slow(True, TREE, "swap"),
        slow(True, CHAIN, "recompute"),
    ],
)
def test_texts_are_those_of_plain_decoding(
    mixed: bool, speculation: SpeculationConfig, preemption: Any
):
    own = past_engine(speculation, mixed=mixed, preemption=preemption, num_pages=14)
    wanted, _ = run(plain_engine(), SAMPLING)
    first, before = run(own, SAMPLING)
    again, after = run(own, SAMPLING)
    assert first == again == wanted
    assert own.scheduler.preemptions[preemption] > 0
    for _ in range(2):
        alone, _ = run(own, SAMPLING[:1])
        assert alone == wanted[:1]
    assert own.scheduler.cache_statistics()[1] > 0, "the prompt was not in the prefix cache"
    assert after < 0.7 * before


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_texts_of_an_adaptive_engine_are_those_of_plain_decoding(mixed: bool):
    shapes = (TreeShape(3, 2, 1), TREE.shape)
    own = past_engine(TREE, mixed=mixed, adaptive=True, shapes=shapes)
    wanted, _ = run(plain_engine(), SAMPLING)
    assert [run(own, SAMPLING)[0] for _ in range(3)] == [wanted] * 3
    own.shape = PLAIN
    assert run(own, SAMPLING)[0] == wanted


@pytest.mark.parametrize("mixed", [False, True])
def test_it_needs_the_match_rule(mixed: bool):
    """An output of a seed was drawn with the numbers that a later request of the seed draws."""
    with pytest.raises(ValueError, match='needs the acceptance rule "match"'):
        past_engine(dataclasses.replace(TREE, acceptance="rejection"), mixed=mixed)


@functools.cache
def small_ring() -> Engine:
    return past_engine(CHAIN, past=96)


def emptied() -> Engine:
    """The engine with a small ring, as it is after an error."""
    small_ring()._fail(RuntimeError("an interrupted call"))
    return small_ring()


def test_outputs_are_kept_with_the_end_of_their_prompts():
    own = emptied()
    assert past_of(own) == [GAP] * 96
    (text,), _ = run(own, SAMPLING[:1])
    kept = [*PROMPTS[0][-BEFORE:], *text, GAP]
    assert past_of(own) == [*[GAP] * (96 - len(kept)), *kept]
    own.use_target(own.params.target)
    assert past_of(own) == [GAP] * 96, "outputs of other weights are kept"
    run(own, SAMPLING[:1])
    own.forget_texts()
    assert past_of(emptied()) == [GAP] * 96
    assert run(own, SAMPLING[:1])[0] == [text]


def test_salted_and_cancelled_requests_are_not_kept():
    own = emptied()
    run(own, [dataclasses.replace(SAMPLING[0], cache_salt="mine")])
    cancelled = own.add(PROMPTS[0], SAMPLING[0])
    while len(cancelled.token_ids) < 2:
        own.step(1)
    own.cancel(cancelled)
    own._drain()
    assert past_of(own) == [GAP] * 96


@pytest.mark.slow
def test_warm_up_compiles_what_writes():
    cache, config = CacheConfig(page_size=8, max_length=LENGTH), EngineConfig(max_rows=4)
    own = Engine(past_params(False, CHAIN), cache, config)
    own.warm_up(SAMPLING[1:2], rows=[4])
    compiled = own.programs.compiled
    run(own, SAMPLING)
    assert own.programs.compiled == compiled


@pytest.mark.slow
@pytest.mark.parametrize("split_by", ["tensor_parallel", "data_parallel", "pipeline_parallel"])
def test_texts_on_two_devices_are_those_of_plain_decoding(split_by: str):
    prompts = ["class Stack:\n", "x = [1, 2, 3]\ny = [1, 2, 3]\n"]
    sampling = [SamplingParams(0.8 * i, seed=i, max_tokens=32, stop_token_ids=()) for i in range(2)]
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64}
    plain = LLM(drafter="none", **options).generate(prompts, sampling)
    axes: dict[str, Any] = {split_by: 2}
    for name in ("suffix", "suffix:512"):
        own = LLM(drafter=name, mesh=make_mesh(**axes), speculation=TREE, **options)
        first, again = own.generate(prompts, sampling), own.generate(prompts, sampling)
        texts = [[one.token_ids for one in some] for some in (plain, first, again)]
        assert texts[0] == texts[1] == texts[2]
    assert sum(one.num_rounds for one in again) < 0.7 * sum(one.num_rounds for one in first)


# Names, and what is refused.


def test_it_is_loaded_by_name():
    drafter = load(drafter="suffix:512").drafter
    assert isinstance(drafter, SuffixDrafter) and drafter.past == 512
    alone = load(drafter="suffix").drafter
    assert isinstance(alone, SuffixDrafter) and alone.past == 0


@pytest.mark.parametrize("name", ["suffix:", "suffix:x", "suffix:-1", "suffix:x+head"])
def test_bad_numbers_of_tokens_are_refused(name: str):
    with pytest.raises(ValueError, match="after suffix: give how many tokens of past outputs"):
        load(drafter=name)


@pytest.mark.parametrize("past", [-1, 1.5, True, 2**30])
def test_bad_sizes_are_refused(past: Any):
    with pytest.raises(ValueError, match="past must be 0 to"):
        SuffixDrafter(past=past)


def test_too_much_past_is_one_line_of_the_command(capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--drafter", "suffix:99999999", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "jaxspec generate: past must be 0 to 16777216 tokens, got 99999999"
    ]


def test_nothing_is_remembered_without_room():
    params = make_params("none", CHAIN).replace(drafter=NGramDrafter())
    with pytest.raises(ValueError, match="looks up no past text"):
        functional.remember(params, empty_state(params, 1, SIZE), [1, GAP], 2)
