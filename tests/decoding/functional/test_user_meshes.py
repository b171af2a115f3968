"""The pure functions inside of a trainer's program on a mesh of its own."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import SpeculationConfig, make_sampling, sample, token_logprobs
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import make_params

PARAMS = make_params("ngram", SpeculationConfig.chain(2))
TOKENS = np.random.default_rng(0).integers(1, 90, (4, 10)).astype(np.int32)
LENGTHS = np.array([10, 9, 7, 10], np.int32)
ROWS = P("data")  # of the trainer's axis
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def in_shard_map(function: Callable[..., Any]) -> Callable[..., Any]:
    specs = {"in_specs": (P(), *[ROWS] * 2), "out_specs": ROWS}
    return jax.shard_map(function, **specs, check_vma=False)


def with_auto_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.sharding.auto_axes(function, out_sharding=ROWS)


def on_mesh(function: Callable[..., Any], model: Any, axis: AxisType) -> np.ndarray:
    """What it gives for rows that are split over two devices, each of which has the model."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis,), devices=jax.devices()[:2])
    whole = jax.device_put(model, NamedSharding(mesh, P()))
    split = jax.device_put((TOKENS, LENGTHS), NamedSharding(mesh, ROWS))
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(function, compiler_options=FAST_COMPILE)(whole, *split))


@pytest.mark.parametrize(
    ("how", "axis"),
    [slow(None, AUTO), (with_auto_axes, EXPLICIT), (in_shard_map, EXPLICIT)],
)
def test_log_probabilities_are_those_of_one_device(how: Any, axis: AxisType):
    function = token_logprobs if how is None else how(token_logprobs)
    found = on_mesh(function, PARAMS.target, axis)
    expected = jax.jit(token_logprobs, compiler_options=FAST_COMPILE)
    np.testing.assert_allclose(found, expected(PARAMS.target, TOKENS, LENGTHS), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [AUTO, EXPLICIT])
def test_samples_are_those_of_one_device(axis: AxisType):
    """Seeds go with the rows: here they are the rows' first tokens."""

    def rollouts(params: Any, tokens: Any, lengths: Any) -> Any:
        sampling = make_sampling(len(tokens), seeds=tokens[:, 0], temperature=1.0)
        return sample(params, tokens, lengths, sampling, new_tokens=6).tokens[:, 0]

    found = on_mesh(in_shard_map(rollouts), PARAMS, axis)
    assert (found == np.asarray(jax.jit(rollouts)(PARAMS, TOKENS, LENGTHS))).all()
