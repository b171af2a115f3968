"""A user's own jit around the pure functions compiles once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec import SpeculationConfig, admit, decode, init_state, load, make_mesh, prefill
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from tests.helpers.compilations import compilations_meanwhile
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE, new_jit, traces
from tests.helpers.random_models import save_random_target

CHAIN = SpeculationConfig.chain(2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_random_target(tmp_path_factory.mktemp("target"))


def admitted(params: EngineParams) -> EngineState:
    """Two rows with prompts, in a program of its own: one by one the operations take longer."""
    prompts, lens = np.array([[7, 8, 9], [3, 4, 5]], np.int32), np.array([3, 3], np.int32)
    return new_jit(admit)(params, init_state(params, 2, 32), np.arange(2), prompts, lens)


def rounds(params: EngineParams, state: EngineState) -> EngineState:
    return decode(params, state, 2, max_rounds=2, greedy=True)[0]


def test_a_step_that_trains_and_decodes_compiles_once(checkpoint):
    params = load(checkpoint, "ngram", speculation=CHAIN)
    optimizer: Any = optax.adam(1e-3)
    moments, state = optimizer.init(params.target), admitted(params)

    def loss(target: Any) -> jax.Array:
        return jnp.mean(target.embed**2)

    def step(params: EngineParams, moments: Any, state: EngineState) -> Any:
        updates, moments = optimizer.update(jax.grad(loss)(params.target), moments)
        target: Any = params.target
        params = params.replace(target=optax.apply_updates(target, updates))
        return params, moments, rounds(params, state)

    jitted = jax.jit(step, donate_argnums=2, compiler_options=FAST_COMPILE)
    for _ in range(3):
        params, moments, state = jitted(params, moments, state)
    assert traces(jitted) == 1


@pytest.mark.parametrize("committed", [slow(False), True])
def test_rounds_compile_once_wherever_the_weights_are(checkpoint, committed: bool):
    """Uncommitted ones by default: the step above."""
    params = load(checkpoint, "ngram", speculation=CHAIN)
    if committed:
        params = jax.device_put(params, jax.devices()[1])
    state = admitted(params)
    assert {leaf.committed for leaf in jax.tree.leaves(state)} == {committed}
    jitted = new_jit(rounds)
    for _ in range(3):
        state = jitted(params, state)
    assert traces(jitted) == 1
    assert state.rows.status.devices() == params.target.embed.devices()


def test_rounds_on_a_mesh_compile_once_and_keep_their_shardings(checkpoint):
    mesh = make_mesh(data_parallel=2)
    params = load(checkpoint, "ngram", speculation=CHAIN, mesh=mesh)
    state = admitted(params)
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    jitted = new_jit(rounds)
    for _ in range(3):
        state = jitted(params, state)
    assert traces(jitted) == 1
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == before


def test_a_second_call_without_jit_compiles_nothing(checkpoint):
    params = load(checkpoint, "none")
    state = admitted(params)
    for _ in range(2):
        with compilations_meanwhile() as programs:
            after, _ = prefill(params, state, width=4)
    assert not programs
    assert np.array_equal(after.rows.context_lens, [3, 3])
