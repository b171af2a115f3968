"""SuffixDrafter: its trees against plain Python, and its text against plain decoding."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec import BUILT_IN_HEAD, LLM
from jaxspec.checkpoints.load import load
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import (
    Drafter,
    EagleDrafter,
    MixedDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.trees.tree import DraftTree, path_tokens
from jaxspec.engine.engine import Engine
from jaxspec.parallel import make_mesh
from tests.helpers.engines import LENGTH, plain_engine, seal
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import empty_state, generate, make_params, random_prompts

CHAIN, TREE = SpeculationConfig.chain(5), SpeculationConfig(10, 4, 3)
SIZE, ROWS = 32, 4
# Small limits, so that short texts reach them; and the defaults.
SMALL = SuffixDrafter(max_match=4, factor=1.5, min_probability=0.3, max_occurrences=5)
DEFAULT, DEEP = SuffixDrafter(), SuffixDrafter(min_match=2, factor=2.0)
Path = tuple[int, ...]


def drafted(drafter: SuffixDrafter, shape: SpeculationConfig, texts: list[list[int]]) -> DraftTree:
    """The trees of some texts, the last token of each the root."""
    rows = np.full((ROWS, SIZE), 1, np.int32)  # what is past the root is no text
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text
    ends = [len(text) - 1 for text in texts] + [0] * (ROWS - len(texts))
    return propose(drafter, shape, ROWS, SIZE)(rows, np.array(ends, np.int32))


@functools.cache
def propose(drafter: Drafter, speculation: SpeculationConfig, rows: int, size: int) -> Any:
    """A program from tokens [rows, size] and the places of roots [rows] to trees."""
    params = make_params("none", speculation)
    empty = empty_state(params, rows, size)

    def trees(tokens: jax.Array, ends: jax.Array) -> DraftTree:
        state = empty.replace(rows=empty.rows.replace(tokens=tokens, context_lens=ends))
        return drafter.propose(params.target, state, RoundOptions(speculation))[0]

    return jax.jit(trees, compiler_options=FAST_COMPILE)


def paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens of each node's path, root not included, in the order of the nodes."""
    found = np.asarray(path_tokens(tree))[row, 1 : int(tree.num_nodes[row])]
    return [tuple(path[path >= 0][::-1].tolist()) for path in found]


def expected(drafter: SuffixDrafter, shape: SpeculationConfig, text: list[int]) -> list[Path]:
    """The same from the definition: a dictionary of suffixes, and counts of what followed them."""
    ends: dict[Path, list[int]] = {}
    for end in range(len(text) - 1):
        for length in range(1, min(end + 1, drafter.max_match) + 1):
            ends.setdefault(tuple(text[end + 1 - length : end + 1]), []).append(end)
    sizes = range(drafter.min_match, min(len(text), drafter.max_match) + 1)
    match = max((n for n in sizes if tuple(text[-n:]) in ends), default=0)
    if match == 0:
        return []
    latest = ends[tuple(text[-match:])][::-1][: drafter.max_occurrences]
    depth = min(shape.max_depth, int(drafter.factor * match))
    counts: dict[Path, int] = {}  # in the order of the latest occurrence
    for end in latest:
        period = text[end + 1 :]
        following = tuple((period * depth)[:depth])
        for length in range(1, depth + 1):
            counts[following[:length]] = counts.get(following[:length], 0) + 1
    least = np.float32(drafter.min_probability) * np.float32(len(latest))
    likely = [path for path, count in counts.items() if count >= least]
    if shape.is_chain:
        return greedy(likely, counts)
    best = sorted(likely, key=lambda path: (-counts[path], len(path)))
    return best[: shape.num_nodes - 1]


def greedy(likely: list[Path], counts: dict[Path, int]) -> list[Path]:
    """The likeliest child of each node, from the root on."""
    chain: list[Path] = [()]
    while children := [path for path in likely if path[:-1] == chain[-1] and path]:
        chain.append(max(children, key=lambda path: counts[path]))
    return chain[1:]


texts_of = functools.partial(st.lists, min_size=1, max_size=SIZE)
repetitive = st.tuples(texts_of(st.integers(0, 3)), st.integers(1, 8)).map(
    lambda drawn: (drawn[0] * drawn[1])[:SIZE]
)


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [
        (SMALL, CHAIN),
        (DEFAULT, TREE),
        slow(SMALL, TREE),
        slow(DEFAULT, CHAIN),
        slow(DEEP, CHAIN),
        slow(DEEP, TREE),
    ],
    ids=["small-chain", "default-tree", "small-tree", "default-chain", "deep-chain", "deep-tree"],
)
@given(st.lists(texts_of(st.integers(0, 1)) | repetitive, min_size=ROWS, max_size=ROWS))
@example([[1], [1, 2], [1, 1], [0, 0, 0, 0, 0]])  # no match, and matches with the first token
@example([[1, 2, 3, 1], [1, 2, 1, 3, 1], [1, 2, 1, 3, 1, 2, 1], [5, 1, 2, 6, 1, 2]])  # ties
@example([[0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 3, 0, 1, 4, 5, 0, 1], [1], [1], [1]])  # unlikely ones
@settings(max_examples=25, deadline=None)
def test_drafts_are_those_of_a_dictionary_of_suffixes(
    drafter: SuffixDrafter, shape: SpeculationConfig, texts: list[list[int]]
):
    tree = drafted(drafter, shape, texts)
    for row, text in enumerate(texts):
        assert paths(tree, row) == expected(drafter, shape, text)


def test_likely_paths_come_first_and_drafts_are_no_deeper_than_matches():
    # After 1 2: 3 4 twice, 5 6 once.
    text = [1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 3, 4, 7, 1, 2]
    tree = drafted(DEFAULT, TREE, [text, [9, 3, 5, 6, 8, 9], [1, 2, 3]])
    assert paths(tree, 0) == [(3,), (3, 4), (5,), (5, 6)]
    assert paths(tree, 1) == [(3,)] and paths(tree, 2) == []


# Acceptance, on a text that repeats a few records. They share a phrase, so four tokens do not say
# what follows, and more do.


def records(seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    phrase = rng.integers(100, size=5).tolist()
    kinds = [[100 + i, *phrase, 110 + i, *phrase, 120 + i, *phrase, 130 + i] for i in range(5)]
    return [token for kind in rng.integers(5, size=15) for token in kinds[kind]]


def rounds_of(drafter: Drafter, shape: SpeculationConfig, text: list[int], start: int) -> list[Any]:
    """(accepted, drafted) tokens of the rounds that would write the text from ``start`` on."""
    ends = jnp.arange(start - 1, len(text) - 1)
    tree = propose(drafter, shape, len(ends), len(text))(
        jnp.tile(jnp.array(text), (len(ends), 1)), ends
    )
    found, length = [], start
    while length < len(text):
        row = length - start
        good = [path for path in paths(tree, row) if list(path) == text[length:][: len(path)]]
        accepted = max(map(len, good), default=0)
        found.append((accepted, int(tree.num_nodes[row]) - 1))
        length += accepted + 1
    return found


def measured(drafter: Drafter, shape: SpeculationConfig) -> tuple[int, float]:
    """Rounds for the text, and the share of drafted tokens that were accepted."""
    found = np.array(rounds_of(drafter, shape, records(), 60))
    accepted, drafted = found.sum(axis=0)
    return len(found), accepted / drafted


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [(DEFAULT, TREE), slow(SuffixDrafter(factor=5.0), CHAIN)],
    ids=["tree", "chain without a limit"],
)
def test_long_matches_draft_better_than_short_ones(
    drafter: SuffixDrafter, shape: SpeculationConfig
):
    rounds, share = measured(drafter, shape)
    rounds_of_ngram, share_of_ngram = measured(NGramDrafter(), shape)
    assert rounds <= rounds_of_ngram
    assert share >= share_of_ngram


# The text.

PROMPTS = [prompt.tolist() for prompt in random_prompts((20, 9, 14, 3, 25, 11), seed=3)]
FEW = 14  # pages, too few for four rows


def requests() -> list[SamplingParams]:
    """Greedy and sampled ones, some of which end at a stop token."""
    found = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=30) for i in range(len(PROMPTS))]
    texts = run(plain_engine(), found)
    for i in (2, 3):
        found[i] = dataclasses.replace(found[i], stop_token_ids=(texts[i][20],))
    return found


def run(engine: Engine, sampling: list[SamplingParams]) -> list[list[int]]:
    generations = engine.add_all(PROMPTS, sampling)
    engine.finish(generations)
    return [generation.token_ids for generation in generations]


def suffix_engine(
    name: str, speculation: SpeculationConfig, preemption: Any, num_pages: int | None = FEW
) -> Engine:
    config = EngineConfig(rounds_per_call=4, max_rows=4, preemption=preemption)
    cache = CacheConfig(page_size=8, max_length=LENGTH, num_pages=num_pages)
    return seal(Engine(make_params(name, speculation), cache, config))


@pytest.mark.slow  # by default: what it drafts, above; texts of other lookup, in test_engine.py
@pytest.mark.parametrize(
    ("name", "speculation", "preemption"),
    [
        ("suffix", SpeculationConfig(6, 3, 2), "recompute"),
        ("suffix", SpeculationConfig.chain(3), "swap"),
        ("suffix mixed", SpeculationConfig(6, 3, 2), "swap"),
        ("suffix mixed", SpeculationConfig.chain(3), "recompute"),
    ],
)
def test_texts_are_those_of_plain_decoding(
    name: str, speculation: SpeculationConfig, preemption: Any
):
    own, sampling = suffix_engine(name, speculation, preemption), requests()
    wanted = run(plain_engine(), sampling)
    assert len(wanted[2]) < 30 and len(wanted[3]) < 30
    assert run(own, sampling) == wanted
    assert own.scheduler.preemptions[preemption] > 0
    for _ in range(2):
        again = own.add(PROMPTS[0], sampling[0])
        own.finish([again])
        assert again.token_ids == wanted[0]
    assert own.scheduler.cache_statistics()[1] > 0, "the prompt was not in the prefix cache"


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["suffix", "suffix mixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_a_batch_are_those_of_plain_decoding(
    name: str, speculation: SpeculationConfig, temperature: float
):
    prompts = random_prompts((5, 17, 30))
    sampling = make_sampling(3, temperature=temperature, seeds=jnp.arange(3))
    plain, _ = generate(make_params("none", CHAIN), prompts, sampling=sampling)
    own, state = generate(make_params(name, speculation), prompts, sampling=sampling)
    assert own == plain
    assert state.rows.stats.accepted[:, 1].sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel", "data_parallel", "pipeline_parallel"])
def test_texts_on_two_devices_are_those_of_plain_decoding(split: str):
    prompts = ["class Stack:\n", "x = [1, 2, 3]\ny = [1, 2, 3]\n"]
    sampling = [SamplingParams(0.8 * i, seed=i, max_tokens=32, stop_token_ids=()) for i in range(2)]
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64}
    plain = LLM(drafter="none", **options).generate(prompts, sampling)
    axes: dict[str, Any] = {split: 2}
    mesh = make_mesh(**axes)
    own = LLM(drafter="suffix", mesh=mesh, speculation=TREE, **options).generate(prompts, sampling)
    assert [one.token_ids for one in own] == [one.token_ids for one in plain]


# Rejection sampling.


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["suffix", "suffix mixed"])
def test_rejection_at_temperature_0_is_greedy(name: str, speculation: SpeculationConfig):
    prompts = random_prompts((5, 17, 30))
    sampling = make_sampling(3, temperature=jnp.array([0.0, 0.0, 0.8]), seeds=jnp.arange(3))
    plain, _ = generate(make_params("none", CHAIN), prompts, sampling=sampling)
    rejecting = dataclasses.replace(speculation, acceptance="rejection")
    own, state = generate(make_params(name, rejecting), prompts, sampling=sampling)
    assert own[:2] == plain[:2]
    assert state.rows.stats.accepted[:, 1].sum() > 0


# Limits.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("factor", 0, "must be a number above 0, got 0"),
        ("factor", -1.0, "must be a number above 0, got -1.0"),
        ("factor", float("nan"), "must be a number above 0, got nan"),
        ("factor", "2", "must be a number above 0, got '2'"),
        ("min_probability", -0.1, "must be 0 to 1, got -0.1"),
        ("min_probability", 1.5, "must be 0 to 1, got 1.5"),
        ("min_probability", None, "must be 0 to 1, got None"),
        ("max_occurrences", 0, "must be an integer, at least 1, got 0"),
        ("max_occurrences", 2.0, "must be an integer, at least 1, got 2.0"),
    ],
)
def test_bad_limits_are_refused(field: str, value: Any, message: str):
    with pytest.raises(ValueError, match=f"^{field} {re.escape(message)}$"):
        DEFAULT.replace(**{field: value})


@pytest.mark.parametrize("drafter", [DEFAULT, NGramDrafter()], ids=["suffix", "ngram"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("min_match", 0, "must be an integer, at least 1, got 0"),
        ("max_match", 0, "must be an integer, at least 1, got 0"),
        ("max_match", 2.0, "must be an integer, at least 1, got 2.0"),
        ("max_match", True, "must be an integer, at least 1, got True"),
    ],
)
def test_bad_lengths_of_matches_are_refused(drafter: Any, field: str, value: Any, message: str):
    with pytest.raises(ValueError, match=f"^{field} {re.escape(message)}$"):
        drafter.replace(**{field: value})
    with pytest.raises(ValueError, match=r"^max_match must be at least min_match 3, got 2$"):
        drafter.replace(min_match=3, max_match=2)


def test_limits_may_be_at_their_ends():
    DEFAULT.replace(min_match=1, max_match=1, max_occurrences=1, min_probability=0, factor=0.1)
    DEFAULT.replace(min_probability=1, factor=float("inf"))


# By name.


def test_it_is_loaded_by_name():
    assert isinstance(load(drafter="suffix").drafter, SuffixDrafter)


@pytest.mark.slow
def test_a_mixture_is_loaded_by_name():
    drafter = load(drafter=f"suffix+{BUILT_IN_HEAD}").drafter
    assert isinstance(drafter, MixedDrafter) and isinstance(drafter.model, EagleDrafter)
    assert isinstance(drafter.lookup, SuffixDrafter)


@pytest.mark.parametrize("name", ["", "none", "ngram", "suffix", "auto", "ngram+x", "suffix+x"])
def test_it_is_mixed_with_a_head_or_a_model(name: str):
    with pytest.raises(
        ValueError, match=r"after suffix\+ give mtp, or the directory or hub id of a"
    ):
        load(drafter=f"suffix+{name}")
