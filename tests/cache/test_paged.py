"""The paged cache against a dictionary of slots, under random operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import (
    CommittedPath,
    Geometry,
    ModelState,
    PagedKV,
    page_slots,
    sequential_page_table,
)
from jaxspec.cache.paged import move
from jaxspec.config.cache import pages_for
from jaxspec.parallel import WHOLE
from pallas_kernels.rope_kv_write.reference import write_rows
from pallas_kernels.selection import Kernels

BATCH, COLUMNS, HEADS, HEAD_DIM, TOKENS = 2, 7, 2, 3, 5
PAGE_SIZES = (1, 3, 4, 16)


def write(cache: PagedKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> PagedKV:
    return PagedKV(k=write_rows(cache.k, k, slots), v=write_rows(cache.v, v, slots))


def compact(
    caches: tuple[PagedKV, ...], source: jax.Array, destination: jax.Array
) -> tuple[PagedKV, ...]:
    return tuple(move(caches, source, destination, Kernels()))


jit_write, jit_compact = jax.jit(write), jax.jit(compact)


class Model:
    """What the cache should hold: rows [G, D] of keys and values by slot; page 0 is not checked."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def write(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> None:
        for index in np.ndindex(slots.shape):
            if slots[index] >= self.page_size:
                self.rows[int(slots[index])] = (k[index], v[index])

    def compact(self, source: np.ndarray, destination: np.ndarray) -> None:
        zero = np.zeros((HEADS, HEAD_DIM))
        read = {slot: self.rows.get(slot, (zero, zero)) for slot in source.ravel()}
        for old, new in zip(source.ravel(), destination.ravel(), strict=True):
            if new >= self.page_size:
                self.rows[new] = read[old]

    def check(self, cache: PagedKV) -> None:
        for pages, part in ((cache.k, 0), (cache.v, 1)):
            expected = np.zeros(pages.shape, np.float32)
            for slot, row in self.rows.items():
                expected[slot // self.page_size, :, slot % self.page_size] = row[part]
            assert np.array_equal(pages[1:], expected[1:])


def empty(page_size: int) -> PagedKV:
    pages = 1 + BATCH * COLUMNS
    geometry = Geometry(pages, page_size, BATCH)
    return PagedKV.create(geometry, HEADS, HEAD_DIM, jnp.dtype(jnp.float32), WHOLE)


def random_table(rng: np.random.Generator) -> np.ndarray:
    return 1 + rng.permutation(BATCH * COLUMNS).reshape(BATCH, COLUMNS)


def slots_of(
    table: np.ndarray, positions: np.ndarray, valid: np.ndarray, page_size: int
) -> np.ndarray:
    arguments = jnp.asarray(table), jnp.asarray(positions), jnp.asarray(valid)
    return np.asarray(page_slots(*arguments, page_size))


def random_slots(rng: np.random.Generator, table: np.ndarray, page_size: int) -> np.ndarray:
    """Distinct slots [B, TOKENS] of each sequence's own pages, some of them the null page's."""
    positions = np.stack(
        [rng.choice(COLUMNS * page_size, TOKENS, replace=False) for _ in range(BATCH)]
    )
    valid = rng.random(positions.shape) < 0.8
    return slots_of(table, positions, valid, page_size)


@given(
    page_size=st.sampled_from(PAGE_SIZES),
    seed=st.integers(0, 2**32 - 1),
    operations=st.lists(st.sampled_from(["write", "compact"]), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=50)
def test_any_writes_and_compactions(page_size: int, seed: int, operations: list[str]):
    rng = np.random.default_rng(seed)
    cache, model, table = empty(page_size), Model(page_size), random_table(rng)
    for operation in ["write", *operations]:
        slots = random_slots(rng, table, page_size)
        if operation == "write":
            k, v = rng.standard_normal((2, BATCH, TOKENS, HEADS, HEAD_DIM)).astype(np.float32)
            cache = jit_write(cache, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
            model.write(k, v, slots)
        else:
            source = random_slots(rng, table, page_size)
            moved = (source >= page_size) & (slots >= page_size)
            source, slots = np.where(moved, source, 0), np.where(moved, slots, 0)
            [cache] = jit_compact((cache,), jnp.asarray(source), jnp.asarray(slots))
            model.compact(source, slots)
    model.check(cache)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_slots_are_where_the_table_says(page_size: int):
    table = random_table(np.random.default_rng(0))
    beyond = COLUMNS * page_size
    positions = np.tile(np.arange(-3, beyond + 3), (BATCH, 1))
    valid = np.random.default_rng(1).random(positions.shape) < 0.7
    slots = slots_of(table, positions, valid, page_size)
    for (row, column), position in np.ndenumerate(positions):
        if valid[row, column] and 0 <= position < beyond:
            page = table[row, position // page_size]
            assert slots[row, column] == page * page_size + position % page_size
        else:
            assert slots[row, column] == 0, "the null page"


def numbered(page_size: int, table: jax.Array) -> PagedKV:
    """A cache whose rows hold their own position in the sequence, keys as such, values negated."""
    everything = jnp.broadcast_to(jnp.arange(COLUMNS * page_size), (BATCH, COLUMNS * page_size))
    own = page_slots(table, everything, jnp.ones_like(everything, bool), page_size)
    rows = jnp.broadcast_to(everything[..., None, None] + 1.0, (*own.shape, HEADS, HEAD_DIM))
    return write(empty(page_size), rows, -rows, own)


def positions_of(cache: PagedKV, table: jax.Array, row: int) -> np.ndarray:
    """What ``numbered`` wrote, read back in the sequence's order."""
    return np.asarray(cache.k[table[row], 0, :, 0]).ravel() - 1


def test_a_commit_moves_the_accepted_nodes_of_every_layer_and_no_more():
    page_size, table = 4, jnp.asarray(random_table(np.random.default_rng(0)))
    committed = CommittedPath(
        rows=jnp.arange(2),
        page_table=table,
        context_lens=jnp.array([6, 3]),
        path=jnp.array([[0, 2, 5], [0, 4, 7]]),
        counts=jnp.array([3, 0]),  # the second row is not decoding
        is_chain=False,
    )
    layers = (numbered(page_size, table), None, numbered(page_size, table))
    state = ModelState(layers=layers, layout=WHOLE).commit(committed, Kernels())
    assert state.layers[1] is None, "a layer that keeps nothing"
    expected = np.arange(COLUMNS * page_size)
    expected[[7, 8]] = [8, 11]
    for cache in (state.layers[0], state.layers[2]):
        assert np.array_equal(positions_of(cache, table, 0), expected)
        assert np.array_equal(positions_of(cache, table, 1), np.arange(COLUMNS * page_size))
        assert jnp.array_equal(cache.v[1:], -cache.k[1:])


def test_committing_a_chain_moves_nothing():
    table = jnp.asarray(random_table(np.random.default_rng(0)))
    states, path = [numbered(4, table)], jnp.array([[0, 1, 2], [0, 1, 2]])
    lens, counts = jnp.array([6, 3]), jnp.array([3, 1])
    committed = CommittedPath(
        rows=jnp.arange(2),
        page_table=table,
        context_lens=lens,
        path=path,
        counts=counts,
        is_chain=True,
    )
    assert PagedKV.commit(states, committed, Kernels()) is states


def test_rows_take_the_dtype_of_the_cache():
    geometry = Geometry(2, 4, 1)
    cache = PagedKV.create(geometry, HEADS, HEAD_DIM, jnp.dtype(jnp.bfloat16), WHOLE)
    rows = jnp.full((1, 1, HEADS, HEAD_DIM), 1 / 3)
    assert write(cache, rows, rows, jnp.array([[5]])).k.dtype == jnp.bfloat16


def test_pages_for_rounds_up():
    assert [pages_for(slots, 16) for slots in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_sequential_tables_share_no_page():
    assert sequential_page_table(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    # Two shards of the batch, each counting pages of its own pool.
    assert sequential_page_table(4, 2, data_parallel=2).tolist() == [[1, 2], [3, 4]] * 2
