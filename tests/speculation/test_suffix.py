"""SuffixDrafter: its trees against plain Python, and its text against plain decoding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters import SuffixDrafter
from jaxspec.speculation.tree import DraftTree, path_tokens
from tests.programs import FAST_COMPILE
from tests.random_models import empty_state, make_params

CHAIN, TREE = SpeculationConfig.chain(5), SpeculationConfig(10, 4, 3)
SIZE, ROWS = 32, 4
# Small limits, so that short texts reach them; and the defaults.
SMALL = SuffixDrafter(max_match=4, factor=0.75, min_probability=0.3, max_occurrences=5)
DRAFTERS = (SMALL, SuffixDrafter(min_match=2, factor=2.0), SuffixDrafter())
Path = tuple[int, ...]


def drafted(drafter: SuffixDrafter, shape: TreeShape, texts: list[list[int]]) -> DraftTree:
    """The trees of some texts, the last token of each the root."""
    rows = [text + [7] * (SIZE - len(text)) for text in texts]  # what is past the root is no text
    rows += [[0] * SIZE] * (ROWS - len(rows))
    ends = [len(text) - 1 for text in texts] + [0] * (ROWS - len(texts))
    return propose(drafter, shape)(jnp.array(rows, jnp.int32), jnp.array(ends, jnp.int32))


@functools.cache
def propose(drafter: SuffixDrafter, shape: TreeShape) -> Any:
    params = make_params("none", SpeculationConfig(shape.num_nodes, shape.max_depth, shape.top_k))
    empty = empty_state(params, ROWS, SIZE)

    def trees(tokens: jax.Array, ends: jax.Array) -> DraftTree:
        state = empty.replace(rows=empty.rows.replace(tokens=tokens, context_lens=ends))
        return drafter.propose(params.target, state, Call(params.speculation))[0]

    return jax.jit(trees, compiler_options=FAST_COMPILE)


def paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens of each node's path, root not included, in the order of the nodes."""
    found = np.asarray(path_tokens(tree))[row, 1 : int(tree.num_nodes[row])]
    return [tuple(path[path >= 0][::-1].tolist()) for path in found]


def expected(drafter: SuffixDrafter, shape: TreeShape, text: list[int]) -> list[Path]:
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


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["small limits", "deep", "defaults"])
@given(st.lists(texts_of(st.integers(0, 1)) | repetitive, min_size=ROWS, max_size=ROWS))
@example([[1], [1, 2], [1, 1], [0, 0, 0, 0, 0]])
@example([[1, 2, 3, 1], [1, 2, 1, 3, 1], [1, 2, 1, 3, 1, 2, 1], [5, 1, 2, 6, 1, 2]])
@settings(max_examples=40, deadline=None)
def test_drafts_are_those_of_a_dictionary_of_suffixes(
    drafter: SuffixDrafter, shape: SpeculationConfig, texts: list[list[int]]
):
    tree = drafted(drafter, shape, texts)
    for row, text in enumerate(texts):
        assert paths(tree, row) == expected(drafter, shape, text)


