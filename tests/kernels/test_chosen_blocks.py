"""Blocks that index heads choose, and attention to them, are those of their definition: for runs,
and for trees whose nodes share blocks with the context and begin new ones on several branches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import encode
from pallas_kernels.paged_attention.chosen_blocks import (
    BlockOptions,
    attend_to_blocks,
    choose_blocks,
)
from pallas_kernels.pages import LayerPages, QueryContext
from tests.helpers.marks import slow

HEADS, GROUP, WIDTH, PAGE, COLUMNS = 2, 3, 4, 5, 9
SLOTS = PAGE * COLUMNS
TABLE = np.random.default_rng(8).permutation(np.arange(1, 1 + COLUMNS))
SHAPES = {
    "index_q": (HEADS, WIDTH),
    "index_k": (1, WIDTH),
    "q": (HEADS * GROUP, WIDTH),
    "k": (HEADS, WIDTH),
    "v": (HEADS, WIDTH),
}


def random_tokens(count: int, seed: int, levels: int) -> dict[str, np.ndarray]:
    """Index queries and keys are of few values: many scores are equal."""
    rng, made = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, shape in SHAPES.items():
        x = rng.standard_normal((count, *shape))
        made[name] = (np.round(x * levels) / levels if "index" in name else x).astype(np.float32)
    return made


def paged(rows: np.ndarray) -> np.ndarray:
    """A sequence's slots [S, G, D] in pages [P, G, K, D], all others NaN."""
    pages = np.full((1 + COLUMNS, PAGE, *rows.shape[1:]), np.nan, np.float32)
    pages.reshape(-1, *rows.shape[1:])[
        (TABLE[np.arange(len(rows)) // PAGE] * PAGE + np.arange(len(rows)) % PAGE)
    ] = rows
    return pages.swapaxes(1, 2)


def chosen(text: dict[str, np.ndarray], head: int, options: BlockOptions) -> list[int]:
    """The blocks of the last token of a text: of equal scores the lower one."""
    keys = text["index_k"][options.first_slot :, 0]
    products = text["index_q"][-1, head] @ keys.T
    blocks = range(-(-len(keys) // options.size))
    scores = [max(products[options.size * n :][: options.size]) for n in blocks]
    scores = [
        np.inf if n > len(blocks) - 1 - options.local else score for n, score in enumerate(scores)
    ]
    return sorted(sorted(blocks, key=lambda n: (-scores[n], n))[: options.top_k])


def attended(text: dict[str, np.ndarray], options: BlockOptions) -> np.ndarray:
    """What the last token of a text attends to: [Q, D]."""
    out = []
    for head in range(HEADS):
        block = (np.arange(len(text["k"])) - options.first_slot) // options.size
        seen = np.isin(block, chosen(text, head, options)) & (block >= 0)
        k, v = (text[name][seen, head].astype(float) for name in "kv")
        scores = text["q"][-1, GROUP * head : GROUP * (head + 1)] @ k.T / WIDTH**0.5
        shares = np.exp(scores)
        out.append(shares / shares.sum(-1, keepdims=True) @ v)
    return np.concatenate(out)


def texts_of(
    tokens: dict[str, np.ndarray], before: int, paths: list[list[int]] | None
) -> list[dict[str, np.ndarray]]:
    """Those that end with each token after ``before`` ones."""
    count = len(tokens["q"]) - before
    paths = [list(range(i + 1)) for i in range(count)] if paths is None else paths
    places = [[*range(before), *(before + node for node in path)] for path in paths]
    return [{name: x[place] for name, x in tokens.items()} for place in places]


def random_paths(count: int, seed: int) -> list[list[int]]:
    rng, paths = np.random.default_rng(seed), [[0]]
    for node in range(1, count):
        paths.append([*paths[rng.integers(max(0, node - 3), node)], node])
    return paths


def context_of(before: int, count: int, paths: list[list[int]] | None) -> QueryContext:
    words = None
    if paths is not None:
        mask = np.zeros((count, -(-count // 32) * 32), np.uint32)
        for node, path in enumerate(paths):
            mask[node, path] = 1
        bits = mask.reshape(count, -1, 32) << np.arange(32, dtype=np.uint32)
        words = jnp.asarray(bits.sum(-1, dtype=np.uint32)[None])
    depth = np.arange(count) if paths is None else np.array([len(path) - 1 for path in paths])
    lens = jnp.array([before])
    return QueryContext(
        jnp.asarray(TABLE[None]), lens, jnp.asarray(before + depth)[None], words, lens + count
    )


def check(
    before: int, count: int, options: BlockOptions, *, is_tree: bool, levels: int = 2
) -> tuple[Any, ...]:
    tokens = random_tokens(before + count, before + count, levels)
    paths = random_paths(count, before) if is_tree else None
    context = context_of(before, count, paths)
    new = {name: jnp.asarray(tokens[name][None, before:]) for name in ("index_q", "q")}
    pages = {name: jnp.asarray(paged(tokens[name])) for name in ("index_k", "k", "v")}
    blocks = choose_blocks(new["index_q"], pages["index_k"], context, options=options)
    layer = LayerPages(pages["k"], pages["v"])
    out = attend_to_blocks(new["q"], layer, context, blocks, options=options)
    texts = texts_of(tokens, before, paths)
    absent = options.count(SLOTS)
    for found, text in zip(np.asarray(blocks)[0], texts, strict=True):
        for head in range(HEADS):
            assert [n for n in found[head] if n < absent] == chosen(text, head, options)
    expected = np.stack([attended(text, options) for text in texts])
    np.testing.assert_allclose(out[0], expected, atol=2e-6)
    return new, layer, context, blocks, out


@pytest.mark.parametrize(
    ("before", "count", "is_tree", "options"),
    [
        (0, 30, False, BlockOptions(4, 3)),
        (17, 12, True, BlockOptions(3, 4)),
        slow(0, 45, False, BlockOptions(7, 2, 2)),
        slow(13, 32, False, BlockOptions(3, 3, first_slot=1, block=5)),
        slow(8, 37, True, BlockOptions(4, 3, 2)),
        slow(1, 44, True, BlockOptions(6, 2, first_slot=1)),
        slow(24, 20, True, BlockOptions(3, 5, block=3)),
        slow(24, 20, True, BlockOptions(3, 5, order_invariant=True)),
        slow(23, 1, True, BlockOptions(5, 2)),
    ],
)
def test_blocks_and_sums_are_those_of_the_definition(
    before: int, count: int, is_tree: bool, options: BlockOptions
):
    check(before, count, options, is_tree=is_tree)


@pytest.mark.slow
def test_bytes_are_numbers_times_scales():
    """Pages of 8 bits hold keys and values."""
    options = BlockOptions(4, 3)
    new, layer, context, blocks, _ = check(21, 9, options, is_tree=True)
    scales = jnp.array([0.5, 2.0])
    stored = [encode(jnp.nan_to_num(x).swapaxes(1, 2), scales).swapaxes(1, 2) for x in layer[:2]]
    bytes_of = LayerPages(stored[0], stored[1], scales, scales)
    found = attend_to_blocks(new["q"], bytes_of, context, blocks, options=options)
    k, v = (
        jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32)
        * scales[:, None, None]
        for x in stored
    )
    expected = attend_to_blocks(new["q"], LayerPages(k, v), context, blocks, options=options)
    np.testing.assert_allclose(found, expected, atol=2e-6)
