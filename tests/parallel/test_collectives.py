"""Reductions over a sharded last dimension give what they give over the whole one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.parallel import WHOLE, Layout, collectives
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.programs import FAST_COMPILE

SHARDS = 4
SPLIT = Layout(vocab=("model",))


def rows(size: int) -> jax.Array:
    """[6, size] with ties, and rows that are hidden but for 2 or 0 entries."""
    rng = np.random.default_rng(size)
    x = rng.integers(-size, size, (6, size)).astype(np.float32)
    x[2] = 1.0
    x[3:] = -np.inf
    x[3, [5, size - 1]] = x[4, [7, 9]] = 3.0
    return jnp.asarray(x)


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_COMPILE)
def top_log_probs(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    indices = lax.top_k(x, k)[1]
    return jnp.take_along_axis(jax.nn.log_softmax(x), indices, axis=-1), indices


def split_and_whole(function, x: jax.Array) -> tuple[Any, Any]:
    """``function(part, layout)`` on every shard of the last dimension, and on all of x."""

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def both(x: jax.Array) -> tuple[Any, Any]:
        shards = x.reshape(len(x), SHARDS, -1)
        parts = jax.vmap(lambda part: function(part, SPLIT), 1, axis_name="model")(shards)
        return parts, function(x, WHOLE)

    return jax.device_get(both(x))


def on_mesh(function: Callable[[jax.Array], jax.Array], x: np.ndarray) -> np.ndarray:
    """What ``function`` gives on each device of a mesh, whose collectives drop NaN."""
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), "model")
    mapped = jax.shard_map(
        lambda part: function(part)[None],
        mesh=mesh, in_specs=P(None, "model"), out_specs=P("model"),
    )  # fmt: skip
    return jax.device_get(jax.jit(mapped, compiler_options=FAST_COMPILE)(x))


@pytest.mark.parametrize("size", [40, 1000, 4000])
@pytest.mark.parametrize("k", [1, 4, 17])
def test_top_log_probs_takes_the_first_of_equals_and_none_twice(size: int, k: int):
    x = rows(size)
    values, indices = jax.device_get(top_log_probs(x, k))
    parts, whole = split_and_whole(
        lambda part, layout: collectives.top_log_probs(part, k, layout, Kernels()), x
    )
    for found in (whole, *zip(*parts, strict=True)):
        # Where logits are in the thousands, so coarse is the logarithm of their sum. The last row
        # has no entry, and so no probabilities.
        np.testing.assert_allclose(found[0][:5], values[:5], atol=1e-7 * size)
        assert np.array_equal(found[1], indices)


def test_one_mesh_axis_does_not_split_batch_and_model():
    with pytest.raises(ValueError, match=r"\['data'\] split both the batch and the model"):
        Layout(batch=("data",), ff=("data", "model"))


def test_the_log_of_a_sum_over_shards_is_that_of_the_whole():
    x = rows(40)[:5]
    parts, whole = split_and_whole(collectives.log_sum_exp, x)
    for shard in parts:
        np.testing.assert_allclose(shard, whole, rtol=1e-6)


def test_sharded_reductions_are_those_of_the_whole():
    x, index = rows(40), jnp.array([0, 39, 17, 5, 20, 9])
    for function in (
        collectives.maximum,
        collectives.argmax,
        collectives.total,
        collectives.all_finite,
        lambda part, layout: collectives.take(part, index, layout),
    ):
        parts, whole = split_and_whole(function, x)
        for shard in parts:
            np.testing.assert_allclose(shard, whole, rtol=1e-6)


def test_the_argmax_of_a_row_with_a_nan_is_an_index_all_the_same():
    x = np.array(rows(40))
    x[0, 13] = x[1, 39] = x[2] = np.nan
    whole = collectives.argmax(jnp.asarray(x), WHOLE)
    assert whole.tolist() == [0, 0, 0, 5, 7, 0]
    off_the_cpu = collectives.one_reduction_argmax(jnp.asarray(x))
    assert off_the_cpu.tolist() == [13, 39, 0, 5, 7, 0], "the first NaN's"
    found = on_mesh(lambda part: collectives.argmax(part, SPLIT), x)
    assert (found == found[0]).all() and ((found >= 0) & (found < 40)).all()
    assert found[0, 3:].tolist() == [5, 7, 0]


def test_a_row_is_finite_while_its_largest_entry_is():
    x = np.array(rows(40))
    x[0, 13], x[1, 39], x[3, 2] = np.nan, np.inf, -np.inf
    expected = [False, False, True, True, True, False]
    assert collectives.all_finite(jnp.asarray(x), WHOLE).tolist() == expected
    found = on_mesh(lambda part: collectives.all_finite(part, SPLIT), x)
    assert found.tolist() == [expected] * SHARDS


def test_a_vocabulary_may_be_split_over_two_mesh_axes():
    x = rows(40)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("outer", "inner"))
    split = P(None, ("outer", "inner"))
    layout = Layout(vocab=("outer", "inner"))

    def reduced(part: jax.Array, layout: Layout) -> dict[str, Any]:
        return {
            "maximum": collectives.maximum(part, layout),
            "argmax": collectives.argmax(part, layout),
            "total": collectives.total(part, layout),
            "all_finite": collectives.all_finite(part, layout),
            "finite_argmax": collectives.finite_argmax(part, part, layout),
            "top_log_probs": collectives.top_log_probs(part, 3, layout, NO_KERNELS),
        }

    on_mesh = jax.shard_map(
        lambda part: reduced(part, layout),
        mesh=mesh, in_specs=split, out_specs=P(), check_vma=False,
    )  # fmt: skip
    whole = jax.jit(reduced, static_argnums=1, compiler_options=FAST_COMPILE)
    found, expected = jax.jit(on_mesh, compiler_options=FAST_COMPILE)(x), whole(x, WHOLE)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6), found, expected)


def test_an_argmax_says_what_rows_are_finite():
    x = np.array(rows(40))
    x[0, 13], x[1, 39], x[2, 0], x[3] = np.nan, np.inf, np.nan, -np.inf
    index, finite = jax.device_get(collectives.finite_argmax(jnp.asarray(x), jnp.asarray(x), WHOLE))
    assert finite.tolist() == [False] * 4 + [True, False]
    assert index[4] == np.argmax(x[4])
    found = on_mesh(lambda part: jnp.stack(collectives.finite_argmax(part, part, SPLIT)), x)
    assert (found == found[0]).all(), "devices agree"
    assert found[0, 0].tolist() == [0, 0, 0, 0, index[4], 0]
    assert found[0, 1].astype(bool).tolist() == finite.tolist()


def test_sharded_rows_join_to_those_of_the_whole():
    x, index = rows(40)[:5], jnp.array([0, 39, 17, 5, 20])
    for function in (
        collectives.log_softmax,
        lambda part, layout: collectives.one_hot(index, part.shape[-1], layout),
    ):
        shards = x.reshape(len(x), SHARDS, -1)
        parts = jax.vmap(lambda part, of=function: of(part, SPLIT), 1, axis_name="model")(shards)
        joined = parts.swapaxes(0, 1).reshape(x.shape)
        np.testing.assert_allclose(joined, function(x, WHOLE), rtol=1e-6)
