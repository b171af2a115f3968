"""Pytrees to disk and back."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoints.orbax_io import CHOICES, restore_pytree, save_pytree, static_choices
from jaxspec.config.rope import RopeConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.state import EngineState
from jaxspec.functional import init_state
from jaxspec.models.heads import DraftHead
from jaxspec.parallel import MODEL_AXIS, Layout, make_mesh
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from tests.helpers.random_models import CONFIG, eagle3_head, make_params, random_target


@pytree
class State(Pytree):
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
    like = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones((3, 1)), "d": jnp.ones(4)}
    with pytest.raises(ValueError, match="another structure") as caught:
        restore_pytree(tmp_path / "x", like)
    message = str(caught.value)
    assert "['d'] is missing" in message
    assert "['c'] is not part of the model" in message
    assert "['a'] is float32[2], not bfloat16[2]" in message
    assert "['b'] is float32[3], not float32[3, 1]" in message


def test_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        restore_pytree(tmp_path / "missing", {"a": jnp.ones(2)})


def test_a_full_directory_is_not_overwritten(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        save_pytree(tmp_path, {"a": jnp.ones(2)})


def test_static_fields_are_described_by_path():
    choices = static_choices(eagle3_head(random_target()))
    assert choices["the tree"] == "DraftHead" and choices[".front"] == "Eagle3Front"
    assert choices[".capture"] == "(0, 1, 2)"
    assert choices[".config.layers[0].mixer.rope.theta"] == "10000.0"
    assert choices[".layers[0].mixer.config.qkv_bias"] == "True"
    assert not any("layout" in path for path in choices)


def test_a_snapshot_may_lack_fields_that_have_their_default(tmp_path: Path):
    """As one that was written before jaxspec had them."""
    target = random_target()
    save_pytree(tmp_path / "old", target)
    file = tmp_path / "old" / "jaxspec_choices.json"
    saved = {
        name: said for name, said in json.loads(file.read_text()).items() if "scale" not in name
    }
    assert len(saved) < len(static_choices(target))
    file.write_text(json.dumps(saved))
    restore_pytree(tmp_path / "old", target)
    other = dataclasses.replace(CONFIG, embed_scale=2.0)
    with pytest.raises(ValueError, match=r"config.embed_scale was not there, not 2.0$"):
        restore_pytree(tmp_path / "old", random_target(other))


def theta(config: Any, value: float) -> Any:
    """The same config with another rope, of the same shapes."""
    return config.map_layers(
        lambda layer: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, rope=RopeConfig(16, value))
        )
    )


@functools.cache
def head() -> DraftHead:
    return eagle3_head(random_target())


def rows_of(drafter: str, *rule: Any) -> EngineState:
    return init_state(make_params(drafter, SpeculationConfig.chain(3, *rule)), 1, 32)


# What is saved, what is restored, made when they are asked for, and what is said.
OTHERS = {
    "another capture list": (
        lambda: (head(), head().replace(capture=(0, 1, 3))),
        r"capture was \(0, 1, 2\), not \(0, 1, 3\)$",
    ),
    "another output": (
        lambda: (head(), head().replace(recycle_normed=True)),
        "recycle_normed was False, not True$",
    ),
    "another rope": (
        lambda: (head(), head().replace(config=theta(head().config, 5.0))),
        r"layers\[0\].mixer.rope.theta was 10000.0, not 5.0$",
    ),
    "another stop token": (
        lambda: (random_target(), random_target(dataclasses.replace(CONFIG, stop_token_ids=(3,)))),
        r"config.stop_token_ids was \(\), not \(3,\)$",
    ),
    "a state of another rule": (
        lambda: (rows_of("ngram"), rows_of("ngram", "rejection")),
        "capacity.acceptance was 'match', not 'rejection'$",
    ),
    "a state of another drafter": (
        lambda: (rows_of("none"), rows_of("ngram")),
        "drafter was '.*NoDrafter', not '.*NGramDrafter'$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_static_choices_are_refused(tmp_path: Path, case: str):
    make, message = OTHERS[case]
    tree, other = make()
    save_pytree(tmp_path / "x", tree)
    with pytest.raises(ValueError, match=message) as caught:
        restore_pytree(tmp_path / "x", other)
    assert "was saved with other choices" in str(caught.value)
    restored = restore_pytree(tmp_path / "x", tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)


def test_another_layout_may_be_restored(tmp_path: Path):
    save_pytree(tmp_path / "x", head())
    split = head().replace(layout=Layout(batch=("data",)))
    assert restore_pytree(tmp_path / "x", split).layout == split.layout


def test_a_snapshot_without_static_fields_is_an_error(tmp_path: Path):
    save_pytree(tmp_path / "x", head())
    (tmp_path / "x" / CHOICES).unlink()
    with pytest.raises(ValueError, match="static fields were is not known"):
        restore_pytree(tmp_path / "x", head())
    restored = restore_pytree(tmp_path / "x", head(), check_choices=False)
    np.testing.assert_array_equal(restored.front.fc.weight, head().front.fc.weight)
