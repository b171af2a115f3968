"""Entries of spans, and attention to them, are those of their definition: for runs of any length,
and for trees whose nodes end spans on several branches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention.entries import (
    EntryOptions,
    IndexQueries,
    entry_attention,
    entry_ends,
)
from pallas_kernels.latent_attention.spans import Spans, write_spans
from pallas_kernels.pages import QueryContext
from pallas_kernels.rope_kv_write.reference import write_rows
from tests.helpers.marks import slow

HEADS, WIDTH, SIZE, PAGE, COLUMNS, WINDOW, TOP = 2, 4, 3, 5, 8, 7, 2
TABLE = np.random.default_rng(8).permutation(np.arange(1, 1 + COLUMNS))
SINKS = np.array([0.3, -0.4], np.float32)


def places(overlapping: bool) -> np.ndarray:
    shape = SIZE, WIDTH * (1 + overlapping)
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def finish(sums: Any, positions: Any) -> Any:
    """What depends on the position, as a rotation does."""
    return sums * (1 + 0.1 * positions[..., None])


def random_tokens(count: int, seed: int, overlapping: bool) -> dict[str, np.ndarray]:
    rng, kept = np.random.default_rng(seed), 2 * WIDTH * (1 + overlapping)
    shapes = {"vectors": (WIDTH,), "kept": (kept,), "keys": (kept,), "weights": (HEADS,)}
    shapes |= {"q": (HEADS, WIDTH), "index_q": (HEADS, WIDTH)}
    return {
        name: rng.standard_normal((count, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def entries_of(kept: np.ndarray, overlapping: bool) -> np.ndarray:
    """Of a text's whole spans: [n, D]."""
    values, gates = np.split(kept.astype(float), 2, axis=-1)
    gates = gates + np.resize(places(overlapping), gates.shape)
    made = []
    for start in range(0, len(kept) - SIZE + 1, SIZE):
        inside = np.s_[start : start + SIZE, -WIDTH:]
        value, gate = values[inside], gates[inside]
        if overlapping and start:
            before = np.s_[start - SIZE : start, :WIDTH]
            value = np.concatenate([values[before], value])
            gate = np.concatenate([gates[before], gate])
        shares = np.exp(gate)
        made.append(finish((value * shares).sum(0) / shares.sum(0), np.array(start)))
    return np.array(made).reshape(-1, WIDTH)


def defined(text: dict[str, np.ndarray], overlapping: bool, indexed: bool) -> np.ndarray:
    """What the last token of a text attends to: [Q, D]."""
    entries = entries_of(text["kept"], overlapping)
    if indexed:
        keys = entries_of(text["keys"], overlapping)
        scores = text["weights"][-1] @ np.maximum(text["index_q"][-1] @ keys.T, 0)
        entries = entries[np.sort(np.argsort(-scores, kind="stable")[:TOP])]
    rows = np.concatenate([entries, text["vectors"][-WINDOW:]])
    scores = np.concatenate([text["q"][-1] @ rows.T / 2, SINKS[:, None]], axis=-1)
    shares = np.exp(scores)
    return (shares / shares.sum(-1, keepdims=True))[:, :-1] @ rows


@functools.partial(jax.jit, static_argnames=("overlapping", "indexed"))
def read(
    pages: dict[str, Any],
    new: Any,
    slots: Any,
    context: QueryContext,
    overlapping: Any,
    indexed: Any,
) -> tuple[dict[str, Any], Any]:
    spans = Spans(jnp.asarray(places(overlapping)), finish, overlapping)
    rows = {name: new[name][None, :, None] for name in pages}
    pages = {
        "vectors": write_rows(pages["vectors"], rows["vectors"], slots),
        **{
            name: write_spans(pages[name], rows[name], slots, spans, context, block=3)
            for name in ("kept", "keys")
        },
    }
    queries = new["index_q"][None], new["weights"][None]
    index = IndexQueries(*queries, pages["keys"], spans.columns, TOP) if indexed else None
    entries = pages["kept"], entry_ends(context, SIZE, PAGE, index)
    options = EntryOptions(WINDOW, 0.5, block=2)
    out = entry_attention(
        *(new["q"][None], pages["vectors"], context, jnp.asarray(SINKS), entries),
        columns=spans.columns,
        options=options,
    )
    return pages, out[0]


@pytest.mark.parametrize(
    ("overlapping", "indexed", "before"),
    [
        (True, True, 10),
        *(slow(True, True, before) for before in (1, 8, 11, 12)),
        *(slow(overlaps, False, before) for overlaps in (False, True) for before in (2, 9)),
    ],
)
def test_tokens_attend_as_defined(overlapping: bool, indexed: bool, before: int):
    size, kinds = 16, {"overlapping": overlapping, "indexed": indexed}
    tokens = random_tokens(before + size, before, overlapping)
    rng, paths = np.random.default_rng(before), [[0]]
    for node in range(1, size):
        paths.append([*paths[rng.integers(max(0, node - 3), node)], node])
    ancestors = np.zeros((1, size, 1), np.uint32)
    for node, path in enumerate(paths):
        ancestors[0, node, 0] = sum(1 << ancestor for ancestor in path)
    pages: Any = {
        name: jnp.full((1 + COLUMNS, 1, PAGE, tokens[name].shape[-1]), jnp.nan)
        for name in ("vectors", "kept", "keys")
    }
    table, depth = jnp.asarray(TABLE[None], jnp.int32), np.array([len(path) for path in paths]) - 1
    found = []
    for start, stop, positions, mask in (
        (0, before, np.arange(before), None),
        (before, before + size, before + depth, jnp.asarray(ancestors)),
    ):
        slots = np.arange(start, stop)
        slots = TABLE[slots // PAGE] * PAGE + slots % PAGE
        context = QueryContext(table, jnp.array([start]), jnp.asarray(positions[None]), mask)
        new = {name: x[start:stop] for name, x in tokens.items()}
        pages, out = read(pages, new, jnp.asarray(slots[None], jnp.int32), context, **kinds)
        found.append(out)
    texts = [list(range(i + 1)) for i in range(before)]
    texts += [[*range(before), *(before + np.array(path))] for path in paths]
    expected = [
        defined({name: x[text] for name, x in tokens.items()}, overlapping, indexed)
        for text in texts
    ]
    np.testing.assert_allclose(np.concatenate(found), np.array(expected), rtol=0, atol=1e-5)
    assert len(max(paths, key=len)) > 2 * SIZE, "no path goes through whole spans"
