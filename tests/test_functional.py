"""The engine as pure functions: inside the caller's jit, under vmap, and saved half-way."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SpeculationConfig, decode, init_state, load, make_sampling, prefill
from jaxspec.speculation import round
from jaxspec.weights.orbax_io import restore_pytree, save_pytree
from tests.checkpoints import tiny_eagle3_head, tiny_llama

PROMPTS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 320
COUNTS = np.array([12, 5], np.int32)
TREE = SpeculationConfig(num_nodes=10, max_depth=3, top_k=3)

# Restores a state in a process of its own and goes on. Arguments: model, head, state, output.
CONTINUE = """
import sys
import jax, numpy as np
from jaxspec import decode, load
from jaxspec.weights.orbax_io import restore_pytree
from tests.test_functional import TREE, empty
params = load(sys.argv[1], sys.argv[2], speculation=TREE)
state = restore_pytree(sys.argv[3], empty(params, seeds=5))
np.save(sys.argv[4], jax.jit(decode)(params, state, 100).tokens)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("functional")
    target = tiny_llama(root / "target", num_hidden_layers=2)
    return target, tiny_eagle3_head(root / "head", target)


@pytest.fixture(scope="module")
def params(checkpoints):
    return load(*checkpoints, speculation=TREE)


def empty(params, seeds):
    sampling = make_sampling(2, temperature=0.8, top_p=0.9, seeds=seeds)
    return init_state(params, batch=2, max_length=64, sampling=sampling)


def generate(params, seeds, num_rounds=100):
    state = prefill(params, empty(params, seeds), PROMPTS, COUNTS)
    return decode(params, state, num_rounds)


def test_vmap_over_seeds_equals_separate_runs(params):
    seeds = jnp.array([0, 1, 2, 3], jnp.uint32)
    together = jax.jit(jax.vmap(generate, in_axes=(None, 0)))(params, seeds)
    alone = jax.jit(generate)
    for index, seed in enumerate(seeds):
        np.testing.assert_array_equal(together.tokens[index], alone(params, seed).tokens)
    assert len({row.tobytes() for row in np.asarray(together.tokens)}) == 4, "seeds must matter"


def test_many_rounds_in_one_call_equal_one_at_a_time(params):
    state = jax.jit(generate, static_argnums=2)(params, 5, 0)
    step = jax.jit(decode)
    for _ in range(64):
        state = step(params, state, 1)
    np.testing.assert_array_equal(state.tokens, jax.jit(generate)(params, 5).tokens)


def test_a_pass_padded_for_the_kernels_sake_changes_nothing(checkpoints, monkeypatch):
    plain = load(checkpoints[0])

    def tokens() -> np.ndarray:
        return np.asarray(jax.jit(lambda params: generate(params, 5).tokens)(plain))

    expected = tokens()
    monkeypatch.setattr(round, "fewest_rows", lambda: 5)
    np.testing.assert_array_equal(tokens(), expected)


def test_decode_stops_early_when_all_are_done(params):
    state = jax.jit(generate)(params, 5)
    assert not state.active.any()
    assert state.stats.rounds.max() < 64
    after = jax.jit(decode)(params, state, 10)
    np.testing.assert_array_equal(after.stats.rounds, state.stats.rounds)


def test_a_state_saved_half_way_continues_in_a_new_process(params, checkpoints, tmp_path):
    half = jax.jit(generate, static_argnums=2)(params, 5, 6)
    assert half.active.any()
    save_pytree(tmp_path / "state", half)
    restored = restore_pytree(tmp_path / "state", empty(params, seeds=5))
    for saved, read in zip(jax.tree.leaves(half), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(saved, read)
    arguments = [*map(str, checkpoints), str(tmp_path / "state"), str(tmp_path / "tokens.npy")]
    subprocess.run([sys.executable, "-c", CONTINUE, *arguments], check=True, cwd=Path.cwd())
    expected = jax.jit(generate)(params, 5).tokens
    np.testing.assert_array_equal(np.load(tmp_path / "tokens.npy"), expected)


def test_a_prompt_longer_than_the_state_is_an_error(params):
    with pytest.raises(ValueError, match="longer than the cache"):
        prefill(params, empty(params, 0), np.zeros((2, 65), np.int32), COUNTS)


def test_a_page_table_too_narrow_for_the_tree_is_an_error(params):
    with pytest.raises(ValueError, match="tree slots need"):
        table = jnp.ones((2, 2), jnp.int32)
        init_state(params, batch=2, max_length=64, page_table=table, num_pages=3)
