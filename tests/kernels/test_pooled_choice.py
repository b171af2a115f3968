"""An indexer that scores pools of tokens chooses as its definition does, of runs of any length and
of trees that begin and end inside of pools; what is kept of accepted nodes is what plain decoding
would keep."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention.pools import Pools, choose_pooled_slots, write_pooled
from pallas_kernels.pages import QueryContext
from tests.helpers.marks import slow

HEADS, WIDTH, SIZE, PAGE, COLUMNS = 2, 4, 3, 5, 8
POOLS = Pools(SIZE, top_k=6)
PLACES = np.random.default_rng(9).standard_normal((SIZE, WIDTH)).astype(np.float32)
TABLE = np.random.default_rng(8).permutation(np.arange(1, 1 + COLUMNS))
NUM_SLOTS = COLUMNS * PAGE


def random_tokens(count: int, seed: int) -> dict[str, np.ndarray]:
    """Of each token a key and a gate, the queries of the heads and their weights."""
    rng = np.random.default_rng(seed)
    shapes = {"kept": (2 * WIDTH,), "q": (HEADS, WIDTH), "weights": (HEADS,)}
    return {
        name: rng.standard_normal((count, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def defined(kept: np.ndarray, q: np.ndarray, weights: np.ndarray) -> list[int]:
    """The places that the last token of a text attends to; all zero scores are equal."""
    whole = len(kept) // SIZE
    keys, gates = np.split(kept[: whole * SIZE].reshape(whole, SIZE, 2 * WIDTH), 2, axis=-1)
    shares = np.exp(gates.astype(float) + PLACES)
    keys = np.sum(keys * shares / shares.sum(axis=1, keepdims=True), axis=1)
    scores = weights @ np.maximum(q @ keys.T, 0)
    best = sorted(np.argsort(-scores, kind="stable")[: POOLS.top_k // SIZE])
    chosen = [SIZE * pool + place for pool in best for place in range(SIZE)]
    return chosen + list(range(whole * SIZE, len(kept)))


@functools.partial(jax.jit, static_argnames="first")
def read(pages: Any, tokens: Any, slots: Any, context: QueryContext, first: int) -> Any:
    rows, places = tokens["kept"][None, :, None], jnp.asarray(PLACES)
    pages = write_pooled(pages, rows, slots, places, context, first)
    of_tokens = tokens["q"][None], tokens["weights"][None]
    how: dict[str, Any] = {"pools": POOLS, "first_slot": first, "block": 2}
    return pages, choose_pooled_slots(*of_tokens, pages, context, **how)[0]


def in_pages(slots: np.ndarray) -> np.ndarray:
    return TABLE[slots // PAGE] * PAGE + slots % PAGE


class Text:
    """A sequence in pages, of which the first ``first`` slots are no tokens."""

    def __init__(self, first: int):
        self.first, self.kept = first, np.zeros((0, 2 * WIDTH), np.float32)
        nothing = np.full((1 + COLUMNS, 1, PAGE, 2 * WIDTH), np.nan, np.float32)
        self.pages = jnp.asarray(nothing)

    def read(self, tokens: dict[str, np.ndarray], masks: np.ndarray | None = None) -> np.ndarray:
        """What tokens after the text choose: a run, or the nodes of a tree with masks [N, N]."""
        start, count = self.first + len(self.kept), len(tokens["q"])
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

    def append(self, tokens: dict[str, np.ndarray]) -> None:
        """Read a run, every token of which chooses as it is defined."""
        chosen = self.read(tokens)
        for index, found in enumerate(chosen):
            kept = np.concatenate([self.kept, tokens["kept"][: index + 1]])
            wanted = defined(kept, tokens["q"][index], tokens["weights"][index])
            self.check(found, np.array(wanted) + self.first)
        self.kept = np.concatenate([self.kept, tokens["kept"]])

    def check(self, found: np.ndarray, wanted: np.ndarray) -> None:
        padding = [NUM_SLOTS] * (POOLS.most - len(wanted))
        assert found.tolist() == [*wanted.tolist(), *padding]

    def accept(self, tokens: dict[str, np.ndarray], path: list[int]) -> None:
        """Move what is kept of the nodes of a path to the text's next slots."""
        start = self.first + len(self.kept)
        source, target = (in_pages(start + np.array(x)) for x in (path, range(len(path))))
        flat = np.array(self.pages).reshape(-1, 2 * WIDTH)
        flat[target] = flat[source]
        self.pages = jnp.asarray(flat.reshape(self.pages.shape))
        self.kept = np.concatenate([self.kept, tokens["kept"][path]])


@pytest.mark.parametrize(
    ("chunks", "first"),
    [([1, 7, 2, 3, 1, 16], 0), slow([5, 5, 5, 5, 5], 1), slow([1] * 20, 1), slow([30], 0)],
    ids=str,
)
def test_runs_choose_as_it_is_defined(chunks: list[int], first: int):
    text = Text(first)
    for seed, count in enumerate(chunks):
        text.append(random_tokens(count, seed))


def random_tree(count: int, seed: int) -> np.ndarray:
    """Masks [N, N] of nodes and their ancestors; most are deep."""
    rng, masks = np.random.default_rng(seed), np.eye(count, dtype=int)
    for node in range(1, count):
        masks[node] |= masks[rng.integers(max(0, node - 3), node)]
    return masks


@pytest.mark.parametrize(("length", "first"), [(10, 0), *(slow(n, 1) for n in (1, 2, 11, 12))])
def test_trees_choose_as_their_paths_do(length: int, first: int):
    """Paths of more than a pool; then the deepest is accepted, and a run follows it."""
    text = Text(first)
    text.append(random_tokens(length, 0))
    tokens, masks = random_tokens(14, 1), random_tree(14, length)
    assert masks.sum(axis=1).max() > 2 * SIZE
    chosen = text.read(tokens, masks)
    for node, found in enumerate(chosen):
        path = np.flatnonzero(masks[node])
        kept = np.concatenate([text.kept, tokens["kept"][path]])
        places = np.array(defined(kept, tokens["q"][node], tokens["weights"][node]))
        inside = np.clip(places - length, 0, len(path) - 1)
        slots = np.where(places < length, places, length + path[inside])
        text.check(found, slots + first)
    text.accept(tokens, np.flatnonzero(masks[np.argmax(masks.sum(axis=1))]).tolist())
    text.append(random_tokens(5, 2))
