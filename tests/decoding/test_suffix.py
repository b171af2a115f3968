"""SuffixDrafter: its trees against plain Python. Its texts are in test_exactness.py, and with past
outputs in test_suffix_past.py."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import (
    Drafter,
    NGramDrafter,
    SuffixDrafter,
)
from jaxspec.decoding.past_text import PastText
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.trees.tree import DraftTree, path_tokens
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import empty_state, make_params

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
    """A program from tokens [rows, size], the places of roots [rows] and past text to trees."""
    params = make_params("none", speculation)
    empty = empty_state(params, rows, size)

    def trees(tokens: jax.Array, ends: jax.Array, past: PastText | None = None) -> DraftTree:
        own = empty.rows.replace(tokens=tokens, context_lens=ends)
        state = empty.replace(rows=own, pool=empty.pool.replace(past=past))
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
@example([[1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 3, 4, 7, 1, 2], [9, 3, 5, 6, 8, 9], [1, 2, 3], [1]])
@settings(max_examples=25, deadline=None)
def test_drafts_are_those_of_a_dictionary_of_suffixes(
    drafter: SuffixDrafter, shape: SpeculationConfig, texts: list[list[int]]
):
    tree = drafted(drafter, shape, texts)
    for row, text in enumerate(texts):
        assert paths(tree, row) == expected(drafter, shape, text)


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
    [(DEFAULT, TREE), (SuffixDrafter(factor=5.0), CHAIN)],
    ids=["tree", "chain without a limit"],
)
@pytest.mark.slow  # by default: the drafts are those of a dictionary, above
def test_long_matches_draft_better_than_short_ones(
    drafter: SuffixDrafter, shape: SpeculationConfig
):
    rounds, share = measured(drafter, shape)
    rounds_of_ngram, share_of_ngram = measured(NGramDrafter(), shape)
    assert rounds <= rounds_of_ngram
    assert share >= share_of_ngram


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
