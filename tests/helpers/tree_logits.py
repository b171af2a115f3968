"""Logits of the nodes of trees, in pages of an odd size, against those of whole texts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import CommittedPath, Geometry, LayerStates, page_slots
from jaxspec.cache.layer_state import commit_all
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.parity import assert_close
from tests.helpers.sampling_reference import plain_logits

PAGE, PAGES, LONGEST = 5, 9, 45
TABLE = jnp.asarray(np.random.default_rng(3).permutation(PAGES)[None] + 1, jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def read(
    model: Decoder, states: LayerStates, tokens: Any, before: Any, ancestors: Any, size: int
) -> tuple[Any, LayerStates]:
    """Logits of tokens [T] after so many, and what is kept; of a tree with ``ancestors``."""
    slots = before + jnp.arange(size)[None]
    positions = slots
    if ancestors is not None:
        depth = jnp.sum(ancestors[:, :size], axis=1) - 1
        positions = (before + depth)[None]
        words = ancestors.reshape(size, -1, 32) * (1 << np.arange(32, dtype=np.uint32))
        ancestors = jnp.sum(words, axis=-1, dtype=jnp.uint32)[None]
    attend = PagedAttend(
        rows=jnp.arange(1),
        page_table=TABLE,
        context_lens=jnp.reshape(before, 1),
        slots=page_slots(TABLE, slots, jnp.ones_like(slots, bool), PAGE),
        positions=positions,
        kv_lens=jnp.reshape(before + size, 1),
        ancestors=ancestors,
    )
    hidden, states, _ = decoder.run(model, tokens[None], positions, states, attend)
    return decoder.logits(model, hidden)[0], states


def random_tree(size: int, seed: int) -> tuple[list[list[int]], np.ndarray]:
    """Paths to the nodes, and which nodes are ancestors: bool [N, 32]."""
    rng, paths = np.random.default_rng(seed), [[0]]
    for node in range(1, size):
        paths.append([*paths[rng.integers(max(0, node - 4), node)], node])
    ancestors = np.zeros((size, 32), bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    return paths, ancestors


def assert_nodes_have_logits_of_texts(
    model: Decoder, before: int, ids: tuple[int, int] = (0, 96), size: int = 20
) -> None:
    """Those of a random tree after so many tokens have; and so have tokens that follow an accepted
    path. ``ids``: the first token, and that after the last one."""
    rng = np.random.default_rng(before)
    text, nodes, end = (rng.integers(*ids, count) for count in (before, size, 4))
    paths, ancestors = random_tree(size, before)
    accepted = max(paths, key=len)
    texts = [[*text, *nodes[path]] for path in paths]
    texts.append([*texts[accepted[-1]], *end])
    padded = np.array([each + [0] * (LONGEST - len(each)) for each in texts])
    whole = np.asarray(plain_logits(model, padded))

    states = model.init_state(Geometry(1 + PAGES, PAGE, 1)).layers
    found, states = read(model, states, text, 0, None, size=before)
    assert_close(found, whole[-1, :before])
    found, states = read(model, states, nodes, before, ancestors, size=size)
    assert_close(found, np.stack([whole[i, len(texts[i]) - 1] for i in range(size)]))
    committed = CommittedPath(
        rows=jnp.arange(1),
        page_table=TABLE,
        context_lens=jnp.array([before]),
        path=jnp.array([accepted]),
        counts=jnp.array([len(accepted)]),
        is_chain=False,
    )
    states = commit_all(states, committed, NO_KERNELS)
    now = before + len(accepted)
    found, _ = read(model, states, end, now, None, size=len(end))
    assert_close(found, whole[-1, now : now + len(end)])
    assert len(accepted) > 6, "no path goes through whole spans or blocks"
