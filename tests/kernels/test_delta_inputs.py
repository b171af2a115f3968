"""What tree nodes do to the states of a delta rule: the Hopper kernel interpreted, lowered, run,
beside a reference written out in NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_inputs import Unprojected, delta_inputs
from pallas_kernels.delta_inputs.cases import KEY_DIM, TEST_CASES, Case, make_arguments
from pallas_kernels.delta_inputs.mosaic_gpu import delta_inputs_mosaic
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast, slow

by_kernel = functools.partial(delta_inputs, k_dim=KEY_DIM, implementation="mosaic_gpu")


def expected(nodes: Any, strengths: Any) -> list[np.ndarray]:
    """q, k, v, g and beta in float64, node by node."""
    qkvz, before, rows, places, taps = (np.asarray(x, np.float64) for x in nodes)
    ba, bias, a_log = (np.asarray(x, np.float64) for x in strengths.projected())
    rows, places = rows.astype(int), places.astype(int)
    past, width, values = before.shape[1], taps.shape[-1], bias.shape[-1]
    convolved = np.zeros((*qkvz.shape[:-1], width))
    for sequence, node in np.ndindex(*places.shape[:2]):
        for tap, place in enumerate(places[sequence, node]):
            if place < past:
                taken = before[rows[sequence], place]
            else:
                taken = qkvz[sequence, place - past][..., :width]
            convolved[sequence, node] += taps[tap] * taken
        convolved[sequence, node] += taps[past] * qkvz[sequence, node][..., :width]
    x = convolved / (1 + np.exp(-convolved))
    q, k, v = np.split(x, [KEY_DIM, 2 * KEY_DIM], axis=-1)
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    b, a = np.split(ba, 2, axis=-1)
    g = -np.exp(a_log) * np.log1p(np.exp(a + bias))
    v = v.reshape(*v.shape[:-1], values, -1)
    return [q / np.sqrt(KEY_DIM), k, v, g, 1 / (1 + np.exp(-b))]


def with_projection(arguments: Any, width: int = 256) -> Any:
    """Arguments with strengths and decays that are not projected yet, of so many inputs."""
    nodes, strengths = arguments
    random, (batch, size, groups, outputs) = np.random.default_rng(0), strengths.ba.shape
    x, weight = (
        jnp.asarray(random.standard_normal(shape) * width**-0.25, jnp.bfloat16)
        for shape in ((batch, size, width), (groups, outputs, width))
    )
    return nodes, strengths._replace(ba=Unprojected(x, weight))


def assert_close(found: Any, arguments: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), expected(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@first_is_fast(TEST_CASES)
def test_it_is_written_out_in_numpy(case: Case):
    arguments = make_arguments(case)
    assert_close(delta_inputs(*arguments, KEY_DIM), arguments)
    assert_close(interpreted(delta_inputs_mosaic, *arguments, detect_races=True), arguments)


@pytest.mark.parametrize("by_parts", [False, slow(True)])
def test_both_grids_are_written_out_in_numpy(by_parts: bool):
    """True: guarded by the first case above, which is small."""
    arguments = make_arguments(Case(2, 2))
    found = interpreted(delta_inputs_mosaic, *arguments, by_parts=by_parts, detect_races=True)
    assert_close(found, arguments)


def test_it_projects_strengths_and_decays():
    """Sums that lie between two numbers of 16 bits may round to either."""
    arguments = with_projection(make_arguments(Case(1, 2, 1)))
    *channels, g, beta = jax.tree.leaves(interpreted(delta_inputs_mosaic, *arguments))
    *wanted, wanted_g, wanted_beta = expected(*arguments)
    for one, other in zip(channels, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
    for one, other in ((g, wanted_g), (beta, wanted_beta)):
        np.testing.assert_allclose(one, other, rtol=2**-6)


@pytest.mark.parametrize("nodes", [13, 14])
def test_a_product_of_many_nodes_comes_before(nodes: int):
    """Those of few nodes are projected by the kernel, of 16 key heads with two value heads."""
    arguments = jax.eval_shape(lambda: with_projection(make_arguments(Case(1, nodes, 16)), 2048))
    assert ("dot_general" in lowered(by_kernel, *arguments)) == (nodes > 13)


@pytest.mark.parametrize("case", [*TEST_CASES, Case(1, 64, 16)], ids=str)
def test_it_lowers_for_cuda(case: Case):
    lowered(by_kernel, *jax.eval_shape(functools.partial(make_arguments, case)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(1, 1, 16), Case(2, 4, 16), Case(2, 5)], ids=str)
def test_on_the_device_it_projects_strengths_and_decays(case: Case):
    """As XLA does: of sums that lie between two numbers of 16 bits some are rounded elsewhere."""
    nodes, strengths = arguments = with_projection(make_arguments(case), 2048)
    kernel = jax.jit(by_kernel)
    first, wanted = kernel(*arguments), kernel(nodes, strengths.projected())
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-6)
    for _ in range(20):
        again = kernel(*arguments)
        assert all(map(jnp.array_equal, jax.tree.leaves(first), jax.tree.leaves(again))), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(32, 16, 16)], ids=str)
def test_on_the_device_it_is_the_reference(case: Case):
    arguments, kernel = make_arguments(case), jax.jit(by_kernel)
    first = kernel(*arguments)
    assert_close(first, arguments)
    for _ in range(20):
        again = kernel(*arguments)
        assert all(map(jnp.array_equal, jax.tree.leaves(first), jax.tree.leaves(again))), "a race"


def test_unsupported_arguments_are_named():
    nodes, strengths = make_arguments(Case(1, 2))
    wide = nodes._replace(before=nodes.before.astype(jnp.float32))
    many = nodes._replace(places=jnp.zeros((9, 64, 3), jnp.int32))
    problems = (
        (nodes, 64, "keys of 64 and 384 values"),
        (wide, KEY_DIM, "bfloat16 inputs after float32 ones"),
        (many, KEY_DIM, "576 nodes: at most 512"),
    )
    for given, k_dim, message in problems:
        with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
            delta_inputs(given, strengths, k_dim, implementation="mosaic_gpu")
