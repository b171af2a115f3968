"""What an indexer chooses, and attention to it, against loops in NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention import latent_attention, latent_attention_with_sinks
from pallas_kernels.latent_attention.chosen import (
    ChosenOptions,
    best_slots,
    choose_slots,
    chosen_attention,
)
from pallas_kernels.pages import AttentionOptions, QueryContext
from tests.helpers.marks import slow

BATCH, TOKENS, HEADS, WIDTH, LATENT, PAGE, COLUMNS = 2, 5, 3, 8, 6, 4, 6
SLOTS = COLUMNS * PAGE
CONTEXT = np.array([9, 0], np.int32)
# A tree: 0 is the root of 1 and 2, and 1 that of 3 and 4.
ANCESTORS = np.array([0b1, 0b11, 0b101, 0b1011, 0b10011], np.uint32)
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


Q, WEIGHTS = numbers(BATCH, TOKENS, HEADS, WIDTH), numbers(BATCH, TOKENS, HEADS)
TABLE = np.array([[3, 1, 7, 8, 2, 5], [4, 6, 9, 10, 12, 11]], np.int32)


def pages(width: int) -> np.ndarray:
    """NaN where nothing was written."""
    filled = np.full((13, 1, PAGE, width), np.nan, np.float32)
    for row in range(BATCH):
        for slot in range(CONTEXT[row] + TOKENS):
            filled[TABLE[row, slot // PAGE], 0, slot % PAGE] = numbers(width)
    return filled


SINKS = np.array([0.4, -0.3, 1.5], np.float32)
ALL = [(exact, block, x) for exact in (False, True) for block in (2, None) for x in (None, SINKS)]
KEYS, VECTORS = pages(WIDTH), pages(WIDTH)


def context(tree: bool) -> QueryContext:
    positions = CONTEXT[:, None] + np.arange(TOKENS)
    mask = np.broadcast_to(ANCESTORS[:, None], (BATCH, TOKENS, 1)) if tree else None
    table, lens, positions, ends = map(jnp.asarray, (TABLE, CONTEXT, positions, CONTEXT + TOKENS))
    return QueryContext(table, lens, positions, None if mask is None else jnp.asarray(mask), ends)


def visible(row: int, token: int, tree: bool, first_slot: int) -> list[int]:
    nodes = [i for i in range(TOKENS) if (ANCESTORS[token] >> i & 1 if tree else i <= token)]
    slots = [*range(CONTEXT[row]), *(CONTEXT[row] + i for i in nodes)]
    return [slot for slot in slots if slot >= first_slot]


def at(filled: np.ndarray, row: int, slot: int) -> np.ndarray:
    return filled[TABLE[row, slot // PAGE], 0, slot % PAGE].astype(np.float64)


def expected_choice(row: int, token: int, top_k: int, tree: bool, first_slot: int) -> list[int]:
    slots = visible(row, token, tree, first_slot)
    scores = [
        float(WEIGHTS[row, token] @ np.maximum(Q[row, token] @ at(KEYS, row, slot), 0))
        for slot in slots
    ]
    best = sorted(range(len(slots)), key=lambda i: (-scores[i], slots[i]))[:top_k]
    return sorted(slots[i] for i in best) + [SLOTS] * (top_k - len(best))


def choose(tree: bool, **options: Any) -> np.ndarray:
    found = choose_slots(
        jnp.asarray(Q),
        jnp.asarray(WEIGHTS),
        jnp.asarray(KEYS),
        context(tree),
        top_k=4,
        **options,
    )
    return np.asarray(found)


@pytest.mark.parametrize(
    ("tree", "options", "block"),
    [
        (True, {"first_slot": 2}, 2),
        (True, {"order_invariant": True}, None),
        *(slow(tree, {}, block) for tree in (True, False) for block in (None, 2)),
        slow(True, {"order_invariant": True}, 2),
    ],
)
def test_the_best_slots_are_chosen(tree: bool, options: dict[str, Any], block: int | None):
    """Also two queries at a time, of which the last block has one."""
    first_slot = options.get("first_slot", 0)
    found = choose(tree, block=block, **options)
    for row in range(BATCH):
        for token in range(TOKENS):
            expected = expected_choice(row, token, 4, tree, first_slot)
            assert found[row, token].tolist() == expected


def test_of_equal_scores_the_lower_slots_are_chosen():
    """Those without a product above 0 are equal, whatever the signs of the weights."""
    keys = np.ones((1, 6, 2), np.float32)
    keys[0, 3] = -1  # the only one above 0
    q, weights = -np.ones((2, 1, 1, 2), np.float32)[:1], np.array([[[-1.0]]], np.float32)
    seen = np.array([[[True, False, True, True, True, True]]])

    def best(weights: np.ndarray) -> Any:
        arrays = map(jnp.asarray, (q, weights, keys))
        return best_slots(*arrays, seen=jnp.asarray(seen), top_k=3).tolist()

    assert best(weights) == [[[0, 2, 4]]]  # its score is below 0
    assert best(-weights) == [[[0, 2, 3]]]


@pytest.mark.parametrize(
    ("order_invariant", "block", "sinks"),
    [*ALL[:2], *(slow(*case) for case in ALL[2:])],
)
def test_attention_is_to_the_chosen_slots(
    order_invariant: bool, block: int | None, sinks: np.ndarray | None
):
    q, slots = numbers(BATCH, TOKENS, HEADS, WIDTH), choose(True)
    found = chosen_attention(
        *map(jnp.asarray, (q, VECTORS, TABLE, slots)),
        sinks=None if sinks is None else jnp.asarray(sinks),
        options=ChosenOptions(LATENT, 0.7, order_invariant, block),
    )
    for row in range(BATCH):
        for token in range(TOKENS):
            rows = np.stack([at(VECTORS, row, s) for s in slots[row, token] if s < SLOTS])
            exps = np.exp(0.7 * q[row, token] @ rows.T)
            sunk = 0 if sinks is None else np.exp(sinks)[:, None]
            expected = exps @ rows[:, :LATENT] / (exps.sum(-1, keepdims=True) + sunk)
            np.testing.assert_allclose(found[row, token], expected, atol=2e-6)


def test_queries_without_a_slot_return_finite_values():
    none = np.full((BATCH, TOKENS, 4), SLOTS, np.int32)
    arguments = map(jnp.asarray, (numbers(BATCH, TOKENS, HEADS, WIDTH), VECTORS, TABLE, none))
    assert np.isfinite(chosen_attention(*arguments, options=ChosenOptions(LATENT, 1.0))).all()


@pytest.mark.parametrize("sinks", [None, slow(SINKS)])
def test_all_slots_give_attention_to_all(sinks: np.ndarray | None):
    """As latent_attention computes it."""
    q = jnp.asarray(numbers(BATCH, TOKENS, HEADS, WIDTH))
    slots = [[visible(row, token, True, 0) for token in range(TOKENS)] for row in range(BATCH)]
    every = np.full((BATCH, TOKENS, SLOTS), SLOTS, np.int32)
    for row in range(BATCH):
        for token in range(TOKENS):
            every[row, token, : len(slots[row][token])] = slots[row][token]
    where = jnp.asarray(VECTORS), jnp.asarray(TABLE), jnp.asarray(every)
    sunk = None if sinks is None else jnp.asarray(sinks)
    found = chosen_attention(q, *where, sunk, options=ChosenOptions(LATENT, 0.7))
    if sunk is None:
        plain = latent_attention(q, where[0], context(True), latent=LATENT, scale=0.7)
    else:
        how = AttentionOptions(scale=0.7)
        given = q, where[0], context(True), sunk
        plain = latent_attention_with_sinks(*given, latent=LATENT, options=how)
    np.testing.assert_allclose(found, plain, atol=2e-6)
