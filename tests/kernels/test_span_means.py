"""An indexer that scores spans by means of keys chooses as its definition does, of runs of any
length and of trees that begin and end inside of spans; attention to what was chosen is that of a
mask."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.rope import RopeConfig
from jaxspec.models.sparse_choice import MeanIndexHeads, chosen_slots, dense_choice, written_keys
from pallas_kernels.float8 import to_bytes
from pallas_kernels.paged_attention.chosen import chosen_heads_attention
from pallas_kernels.pages import LayerPages, QueryContext
from tests.helpers.marks import slow
from tests.kernels.test_pooled_choice import COLUMNS, NUM_SLOTS, PAGE, TABLE, in_pages, random_tree

HEADS, WIDTH, SIZE, TOP_K, EPS = 2, 6, 3, 6, 1e-6
ROPE = RopeConfig(WIDTH, 10.0, rotary_dim=4)
NORM = (1 + 0.3 * np.random.default_rng(9).standard_normal(WIDTH)).astype(np.float32)


def heads_of(tokens: dict[str, Any]) -> MeanIndexHeads:
    weights = jnp.full((1, len(tokens["q"]), HEADS), 0.5)
    how = TOP_K, SIZE, jnp.asarray(NORM), EPS, ROPE
    queries, keys = (jnp.asarray(tokens[name])[None] for name in ("q", "keys"))
    return MeanIndexHeads(queries, keys[:, :, None], weights, *how)


def random_tokens(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"keys": (WIDTH,), "q": (HEADS, WIDTH)}
    return {
        name: rng.standard_normal((count, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def defined(keys: np.ndarray, q: np.ndarray) -> list[int]:
    """The places that the last token of a text attends to; all zero scores are equal."""
    whole = len(keys) // SIZE
    means = keys[: whole * SIZE].astype(float).reshape(whole, SIZE, WIDTH).mean(axis=1)
    normed = means / np.sqrt((means**2).mean(axis=1, keepdims=True) + EPS) * NORM
    angles = SIZE * np.arange(whole)[:, None] * ROPE.theta ** -np.array([0, 0.5])
    pairs, rest = normed[:, :2] + 1j * normed[:, 2:4], normed[:, 4:]
    turned = pairs * np.exp(1j * angles)
    turned = np.concatenate([turned.real, turned.imag, rest], axis=1)
    scores = np.maximum(q @ turned.T, 0).sum(axis=0)
    best = sorted(np.argsort(-scores, kind="stable")[: TOP_K // SIZE])
    chosen = [SIZE * span + place for span in best for place in range(SIZE)]
    return chosen + list(range(whole * SIZE, len(keys)))


@functools.partial(jax.jit, static_argnames="first")
def read(pages: Any, tokens: Any, slots: Any, context: QueryContext, first: int) -> Any:
    heads = heads_of(tokens)
    pages = written_keys(pages, heads, slots, context, first)
    chosen = chosen_slots(pages, heads, context, first, order_invariant=False)
    assert chosen is not None
    return pages, chosen[0]


class Text:
    """A sequence in pages, of which the first ``first`` slots are no tokens."""

    def __init__(self, first: int):
        self.first, self.keys = first, np.zeros((0, WIDTH), np.float32)
        self.pages = jnp.full((1 + COLUMNS, 1, PAGE, WIDTH), jnp.nan)

    def read(self, tokens: dict[str, np.ndarray], masks: np.ndarray | None = None) -> np.ndarray:
        """What tokens after the text choose: a run, or the nodes of a tree with masks [N, N]."""
        start, count = self.first + len(self.keys), len(tokens["q"])
        depth = np.arange(count) if masks is None else masks.sum(axis=1) - 1
        bits = None if masks is None else (masks << np.arange(count)).sum(axis=1).astype(np.uint32)
        context = QueryContext(
            page_table=jnp.asarray(TABLE)[None],
            context_lens=jnp.array([start]),
            positions=jnp.asarray(start + depth)[None],
            ancestors=None if bits is None else jnp.asarray(bits)[None, :, None],
            kv_lens=jnp.array([start + count]),
        )
        slots = jnp.asarray(in_pages(start + np.arange(count)))[None]
        self.pages, chosen = read(self.pages, tokens, slots, context, self.first)
        return np.asarray(chosen)

    def check(self, found: np.ndarray, wanted: np.ndarray) -> None:
        padding = [NUM_SLOTS] * (TOP_K + SIZE - 1 - len(wanted))
        assert found.tolist() == [*wanted.tolist(), *padding]

    def append(self, tokens: dict[str, np.ndarray]) -> None:
        """Read a run, every token of which chooses as it is defined."""
        for index, found in enumerate(self.read(tokens)):
            keys = np.concatenate([self.keys, tokens["keys"][: index + 1]])
            self.check(found, np.array(defined(keys, tokens["q"][index])) + self.first)
        self.keys = np.concatenate([self.keys, tokens["keys"]])


@pytest.mark.parametrize(
    ("chunks", "first"),
    [([4] * 6, 0), slow([1, 7, 2, 3, 1, 16], 0), slow([5, 5, 5, 5, 5], 1), slow([30], 0)],
    ids=str,
)
def test_runs_choose_as_it_is_defined(chunks: list[int], first: int):
    text = Text(first)
    for seed, count in enumerate(chunks):
        text.append(random_tokens(count, seed))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "first"), [(10, 0), (1, 1), (11, 1)])
def test_trees_choose_as_their_paths_do(length: int, first: int):
    text = Text(first)
    text.append(random_tokens(length, 0))
    tokens, masks = random_tokens(14, 1), random_tree(14, length)
    for node, found in enumerate(text.read(tokens, masks)):
        path = np.flatnonzero(masks[node])
        keys = np.concatenate([text.keys, tokens["keys"][path]])
        places = np.array(defined(keys, tokens["q"][node]))
        inside = np.clip(places - length, 0, len(path) - 1)
        text.check(found, np.where(places < length, places, length + path[inside]) + first)


@pytest.mark.slow
def test_whole_sequences_choose_as_it_is_defined():
    tokens = random_tokens(20, 4)
    chosen = dense_choice(heads_of(tokens))
    assert chosen is not None
    for index, found in enumerate(np.asarray(chosen)[0]):
        wanted = defined(tokens["keys"][: index + 1], tokens["q"][index])
        assert found.tolist() == [*wanted, *[20] * (TOP_K + SIZE - 1 - len(wanted))]


@pytest.mark.parametrize("how", ["plain", slow("order_invariant"), slow("bytes")])
def test_attention_to_chosen_slots_is_that_of_a_mask(how: str):
    rng = np.random.default_rng(0)
    heads, kv_heads, width, count = 4, 2, 8, 7
    q = rng.standard_normal((1, 3, heads, width)).astype(np.float32)
    k, v = (rng.standard_normal((kv_heads, NUM_SLOTS, width)).astype(np.float32) for _ in "kv")
    chosen = np.sort(rng.permuted(np.tile(np.arange(NUM_SLOTS), (3, 1)), axis=1)[:, :count])
    chosen[1, 5:] = NUM_SLOTS

    def in_order(x: np.ndarray) -> Any:
        """Pages of these slots; others are NaN."""
        pages = np.full((1 + COLUMNS, kv_heads, PAGE, width), np.nan, np.float32)
        pages[TABLE] = x.reshape(kv_heads, COLUMNS, PAGE, width).swapaxes(0, 1)
        return jnp.asarray(pages)

    scales: tuple[Any, ...] = (None, None)
    pages, near = (in_order(k), in_order(v)), 1e-6
    if how == "bytes":
        scales, near = (jnp.array([0.5, 2.0]), jnp.array([1.5, 0.25])), 0.1
        each = zip(pages, scales, strict=True)
        pages = tuple(to_bytes(x / scale[:, None, None]) for x, scale in each)
    found = chosen_heads_attention(
        jnp.asarray(q),
        LayerPages(*pages, *scales),
        jnp.asarray(TABLE)[None],
        jnp.asarray(chosen)[None],
        order_invariant=how == "order_invariant",
        block=2,
    )
    for token, slots in enumerate(chosen):
        slots = slots[slots < NUM_SLOTS]
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = k[group, slots] @ q[0, token, head] * width**-0.5
            weights = np.exp(scores - scores.max())
            wanted = weights @ v[group, slots] / weights.sum()
            np.testing.assert_allclose(found[0, token, head], wanted, atol=near)
