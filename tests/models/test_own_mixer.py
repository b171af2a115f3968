"""A user-defined mixer and layer state: a recurrence that keeps one vector for each row.

Nothing of the package knows it. It stands here as the proof that recurrent layers fit: trees are
verified and committed, prompts read in chunks and by index, rows handed on to other requests.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec import functional
from jaxspec.cache import CommittedPath, Geometry
from jaxspec.config.rope import RopeConfig
from jaxspec.decoding.drafters import DraftModelDrafter
from jaxspec.decoding.trees.tree import unpack_mask
from jaxspec.functional import EngineParams
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import Kernels
from tests.helpers.admitted_rows import (
    CAPACITY,
    assert_rows_have_texts,
    greedy_texts,
    with_mixer,
)
from tests.helpers.random_models import CONFIG, random_target

DECAY = 0.7


@dataclasses.dataclass(frozen=True)
class DecayConfig:
    """h of a token = DECAY * h of the one before it + u of its own."""

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return ()

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth."""


@pytree
class DecayState(Pytree):
    """h after the last committed token; between a tree's pass and its commit, of every node."""

    h: Array = array("batch", "hidden")  # [rows of the engine, H]
    nodes: Array | None = array("batch", "nodes", "hidden", default=None)  # [B, N, H]

    @property
    def overwritable(self) -> bool:
        return False

    @classmethod
    def commit(
        cls, states: Sequence[Any], committed: CommittedPath, kernels: Kernels
    ) -> list["DecayState"]:
        last = jnp.maximum(committed.counts - 1, 0)
        node = jnp.take_along_axis(committed.path, last[:, None], axis=1)[..., None]
        results = []
        for state in states:
            after = jnp.take_along_axis(state.nodes, node, axis=1)[:, 0]
            results.append(kept(state, committed.rows, committed.counts, after))
        return results

    def reset(self, rows: Array) -> "DecayState":
        return self.replace(h=self.h.at[rows].set(0, mode="drop"))


def kept(state: DecayState, rows: Array, counts: Array, after: Array) -> DecayState:
    """With ``after`` [B, H] for the rows that committed anything."""
    place = jnp.where(counts > 0, rows, len(state.h))
    return state.replace(h=state.h.at[place].set(after, mode="drop"), nodes=None)


@pytree
class Decay(Pytree):
    u: Linear
    o: Linear
    config: DecayConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        inputs, where = self.u(x), step.attend
        if state is None:
            start = jnp.zeros_like(inputs[:, 0])
            h = recurrence(start, inputs, *chain(inputs.shape[1]))
            return self.o.product(h, "o"), None
        assert isinstance(where, PagedAttend)
        start, size = state.h[where.rows], inputs.shape[1]
        if where.ancestors is None:
            h = recurrence(start, inputs, *chain(size))
            counts = where.kv_lens - where.context_lens
            last = jnp.maximum(counts - 1, 0)[:, None, None]
            after = jnp.take_along_axis(h, last, axis=1)[:, 0]
            return self.o.product(h, "o"), kept(state, where.rows, counts, after)
        depth = where.positions - where.context_lens[:, None]
        h = recurrence(start, inputs, unpack_mask(where.ancestors, size), depth)
        return self.o.product(h, "o"), state.replace(nodes=h)

    @property
    def reader(self) -> None:
        """Hidden states come as an array."""

    def init_state(self, geometry: Geometry, layout: Layout) -> DecayState:
        return DecayState(h=jnp.zeros((geometry.num_rows, self.u.out_shape[0])))


def chain(size: int) -> tuple[Array, Array]:
    """The ancestors [1, T, T] and depths [1, T] of consecutive tokens."""
    return jnp.tri(size, dtype=bool)[None], jnp.arange(size)[None]


def recurrence(start: Array, inputs: Array, ancestors: Array, depth: Array) -> Array:
    """h [B, T, H] of every token: over its ancestors (itself included), and the start [B, H]."""
    distance = depth[:, :, None] - depth[:, None, :]
    weights = jnp.where(ancestors, DECAY**distance, 0.0)
    h = jnp.einsum("bts,bsh->bth", weights, inputs)
    return h + DECAY ** (depth[..., None] + 1) * start[:, None]


@pytest.fixture(scope="module")
def target() -> Decoder:
    """Attention, then the recurrence."""
    hidden, rng = CONFIG.hidden_size, np.random.default_rng(5)
    weights = [jnp.asarray(rng.standard_normal((hidden, hidden)) / 8, jnp.float32) for _ in "uo"]
    u, o = (Linear(weight=weight, axes=("hidden", "hidden")) for weight in weights)
    return with_mixer(Decay(u=u, o=o, config=DecayConfig()), DecayConfig())


@pytest.mark.slow  # by default: the recurrences of families
def test_rows_admitted_at_any_time_have_the_same_texts(target: Decoder):
    assert_rows_have_texts(target, greedy_texts(target))


def test_a_draft_model_whose_layers_cannot_read_again_is_refused(target: Decoder):
    drafter = DraftModelDrafter(model=target)
    params = EngineParams(target=random_target(), drafter=drafter, speculation=CAPACITY)
    with pytest.raises(ValueError, match="cannot draft: its layers keep DecayState"):
        functional.init_state(params, 2, 48)
