"""Memory that a prompt takes while it is read does not grow with the layers of a model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.models.map_after import map_after
from jaxspec.models.mixers.rows import RowsOfPass
from pallas_kernels.selection import NO_KERNELS
from tests.cache.test_delta_rule import PROMPT, ROWS, as_nodes, empty, random_inputs


def by_map(before: Array, function: Callable[[Any], Array], parts: Any) -> Array:
    return lax.map(function, parts)


def layers(mapped: Callable[..., Array], x: Array, weights: Array) -> Array:
    for weight in weights:
        parts = x.reshape(4, -1, x.shape[-1])
        multiplied = mapped(x, lambda part, weight=weight: jnp.tanh(part @ weight), parts)
        x = x + multiplied.reshape(x.shape)
    return x


def numbers(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def test_map_after_has_the_values_and_gradients_of_map():
    x, weights = numbers(8, 16), numbers(3, 16, 16)

    def both(mapped: Callable[..., Array]) -> Any:
        def total(x: Array, weights: Array) -> tuple[Array, Array]:
            found = layers(mapped, x, weights)
            return jnp.sum(found**2), found

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, weights)

    jax.tree.map(np.testing.assert_array_equal, both(map_after), both(by_map))


def test_no_number_of_what_was_before_stays():
    before = jnp.full(3, jnp.nan)
    assert (map_after(before, lambda x: x + 1, jnp.zeros((2, 3))) == 1).all()


@pytest.mark.parametrize("mapped, grows", [(map_after, False), (by_map, True)])
def test_memory_does_not_grow_with_layers(mapped: Callable[..., Array], grows: bool):
    """That of lax.map does: where it no longer does, map_after is not needed."""

    def temporaries(count: int) -> int:
        sizes = (1024, 64), (count, 64, 64)
        shapes = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
        program = jax.jit(lambda *given: layers(mapped, *given)).lower(*shapes).compile()
        memory: Any = program.memory_analysis()
        return memory.temp_size_in_bytes

    few, many = temporaries(2), temporaries(8)
    assert (many > 2 * few) == grows


def test_what_follows_a_prompt_waits_for_the_state_of_the_layer():
    """Else XLA computes the states of all layers at the end, from the inputs of all of them."""
    q, inputs = random_inputs(np.random.default_rng(0), ROWS, PROMPT)
    run = RowsOfPass(jnp.arange(ROWS), jnp.zeros(ROWS, int), jnp.full(ROWS, PROMPT))

    def read(state: DeltaState, q: Array, nodes: DeltaNodes) -> Any:
        return run.read(state, q, nodes, NO_KERNELS)

    program = jax.make_jaxpr(read)(empty(ROWS), q, as_nodes(inputs)).jaxpr
    assert program.eqns[-1].primitive.name == "optimization_barrier"
    assert program.eqns[-1].outvars == program.outvars
