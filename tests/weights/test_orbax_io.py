"""Pytrees to disk and back."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.pytree import array, pytree, static
from jaxspec.sharding import MODEL_AXIS, make_mesh
from jaxspec.weights.orbax_io import restore_pytree, save_pytree


@pytree
class State:
    weights: tuple[jax.Array, ...] = array("rows")
    absent: jax.Array | None
    counts: jax.Array
    empty: jax.Array
    name: str = static()


@pytest.fixture
def state() -> State:
    sharding = NamedSharding(make_mesh(tensor_parallel=4), P(MODEL_AXIS))
    return State(
        weights=(jax.device_put(jnp.arange(8.0), sharding), jnp.ones((2, 3), jnp.bfloat16)),
        absent=None,
        counts=jnp.array([3, 4], jnp.uint32),
        empty=jnp.zeros((0, 2)),
        name="static",
    )


def shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


@pytest.mark.parametrize("like", [lambda tree: tree, shapes], ids=["arrays", "shapes"])
def test_round_trip(tmp_path: Path, state: State, like: Any):
    save_pytree(tmp_path / "new" / "checkpoint", state)
    restored = restore_pytree(tmp_path / "new" / "checkpoint", like(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        np.testing.assert_array_equal(ours, theirs)


def test_restore_onto_other_shardings(tmp_path: Path):
    save_pytree(tmp_path / "x", {"w": jnp.arange(8.0)})
    sharding = NamedSharding(make_mesh(tensor_parallel=2), P(MODEL_AXIS))
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    restored = restore_pytree(tmp_path / "x", like)["w"]
    assert restored.sharding == sharding
    np.testing.assert_array_equal(restored, np.arange(8.0))


def test_another_structure_is_refused(tmp_path: Path):
    save_pytree(tmp_path / "x", {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(4)})
    like = {"a": jnp.ones(2), "b": jnp.ones((3, 1)), "d": jnp.ones(4)}
    with pytest.raises(ValueError, match="another structure") as caught:
        restore_pytree(tmp_path / "x", like)
    message = str(caught.value)
    assert "['d'] is missing" in message
    assert "['c'] is not part of the model" in message
    assert "['b'] is float32[3], not float32[3, 1]" in message


def test_another_dtype_is_refused(tmp_path: Path):
    save_pytree(tmp_path / "x", {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"is float32\[2\], not bfloat16\[2\]"):
        restore_pytree(tmp_path / "x", {"a": jnp.ones(2, jnp.bfloat16)})


def test_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        restore_pytree(tmp_path / "missing", {"a": jnp.ones(2)})


def test_a_full_directory_is_not_overwritten(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        save_pytree(tmp_path, {"a": jnp.ones(2)})
