"""Logits processing against a plain reference, and what is refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.decoding.sampling import (
    make_controls,
    make_sampling,
    perturb,
    probabilities,
    process_logits,
    vocab_ids,
)
from jaxspec.parallel import WHOLE, Layout
from tests.helpers.programs import traces

VOCAB, ROWS, NODES = 40, 4, 3
jit_process, jit_perturb = jax.jit(process_logits), jax.jit(perturb)


def reference(logits: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """One row [V], by sorting. Equal logits are kept or dropped together."""
    if temperature == 0:
        return logits
    scaled = logits / np.float32(temperature)
    order = np.sort(scaled)[::-1]
    kept = scaled >= order[(top_k or len(order)) - 1]
    weights = np.where(kept, np.exp(scaled.astype(np.float64) - order[0]), 0.0)
    if top_p < 1:
        sorted_weights = np.sort(weights)[::-1]
        enough = np.cumsum(sorted_weights) >= np.float32(top_p) * weights.sum() * (1 - 1e-6)
        kept &= weights >= sorted_weights[np.argmax(enough)]
    kept &= weights >= np.float32(min_p)
    return np.where(kept, scaled, -np.inf)


# Halves make ties common, and keep sums away from a threshold by more than float32's rounding.
logit_rows = st.lists(
    st.integers(-12, 12).map(lambda x: x / 2), min_size=VOCAB, max_size=VOCAB
).map(lambda row: np.array(row, np.float32))
parameters = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 100]),
    st.sampled_from([0.1, 0.37, 0.77, 0.93, 1.0]),
    st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)


@given(
    rows=st.lists(logit_rows, min_size=ROWS * NODES, max_size=ROWS * NODES),
    options=st.lists(parameters, min_size=ROWS, max_size=ROWS),
)
@settings(deadline=None, max_examples=50)
def test_processed_logits_are_those_of_sorting(rows, options):
    logits = np.stack(rows).reshape(ROWS, NODES, VOCAB)
    temperature, top_k, top_p, min_p = (np.array(values) for values in zip(*options, strict=True))
    sampling = make_sampling(ROWS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.asarray(jit_process(logits, sampling))
    for row, row_options in enumerate(options):
        capped = (row_options[0], min(row_options[1], VOCAB), *row_options[2:])
        for node in range(NODES):
            np.testing.assert_allclose(
                found[row, node], reference(logits[row, node], *capped), rtol=1e-6
            )


def random_logits(*shape: int) -> jax.Array:
    noise = np.random.default_rng(0).standard_normal(shape)
    return jax.device_put((3 * noise).astype(np.float32))


def test_equal_logits_are_kept_together():
    logits = np.array([[[2.0, 1.0, 1.0, 1.0, 0.0]]], np.float32)
    top_k = make_sampling(1, temperature=1.0, top_k=2)
    for sampling in (top_k, make_sampling(1, temperature=1.0, top_p=0.5)):
        processed = np.asarray(jit_process(logits, sampling))
        assert np.isfinite(processed[0, 0]).tolist() == [True, True, True, True, False]


def test_rows_of_temperature_0_keep_their_logits_beside_sampled_rows():
    logits = np.asarray(random_logits(2, NODES, VOCAB))
    sampling = make_sampling(2, temperature=np.array([0.0, 0.7]), top_k=3, top_p=0.5)
    processed = np.asarray(jit_process(logits, sampling))
    np.testing.assert_array_equal(processed[0], logits[0])
    assert (np.isfinite(processed[1]).sum(axis=-1) <= 3).all()
    ids, positions = vocab_ids(VOCAB, WHOLE), np.zeros((2, NODES), int)
    perturbed = np.asarray(jit_perturb(processed, sampling, positions, ids))
    np.testing.assert_array_equal(perturbed[0], logits[0])
    one_hot = np.asarray(jax.jit(probabilities)(processed, sampling))[0]
    np.testing.assert_array_equal(one_hot, np.eye(VOCAB)[logits[0].argmax(axis=-1)])


def test_sharded_vocabulary_is_processed_as_a_whole_one():
    logits = random_logits(ROWS, NODES, VOCAB)
    sampling = make_sampling(
        ROWS,
        temperature=np.array([0.0, 0.7, 1.0, 2.0]),
        top_k=np.array([0, 0, 9, 20]),
        top_p=np.array([1.0, 0.8, 1.0, 0.9]),
        min_p=np.array([0.0, 0.0, 0.05, 0.0]),
        seeds=np.arange(ROWS),
    )
    positions = jax.device_put(np.arange(ROWS * NODES).reshape(ROWS, NODES))

    def sample(logits, layout):
        processed = process_logits(logits, sampling, layout)
        ids = vocab_ids(logits.shape[-1], layout)
        return (
            processed,
            perturb(processed, sampling, positions, ids),
            probabilities(processed, sampling, layout),
        )

    shards = logits.reshape(ROWS, NODES, 4, VOCAB // 4)
    split = jax.vmap(lambda part: sample(part, Layout(vocab=("model",))), 2, 2, axis_name="model")
    whole = jax.jit(lambda logits: sample(logits, WHOLE))(logits)
    for one, parts in zip(whole, jax.device_get(jax.jit(split)(shards)), strict=True):
        np.testing.assert_allclose(one, parts.reshape(one.shape), rtol=1e-6)


def test_no_value_of_a_parameter_compiles_anew():
    logits, process = random_logits(2, NODES, VOCAB), jax.jit(lambda *args: process_logits(*args))
    for options in (
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 5},
        {"temperature": np.array([0.0, 1.0]), "top_p": 0.9, "min_p": 0.1, "seeds": 7},
    ):
        process(logits, make_sampling(2, **options))
    assert traces(process) == 1


def test_steps_that_no_row_needs_may_be_skipped():
    logits, greedy = random_logits(2, NODES, VOCAB), make_sampling(2, top_k=3, top_p=0.5)
    assert process_logits(logits, greedy, greedy=True) is logits
    np.testing.assert_array_equal(process_logits(logits, greedy), logits)
    assert not greedy.drawn.any()


def test_one_seed_gives_every_row_its_own_and_an_array_is_taken_as_it_is():
    assert make_sampling(3).seeds.tolist() == [0, 1, 2]
    assert make_sampling(3, seeds=7).seeds.tolist() == [7, 8, 9]
    assert make_sampling(3, seeds=jnp.array(7)).seeds.tolist() == [7, 8, 9]
    assert make_sampling(3, seeds=np.array([7, 7, 2**32 - 1])).seeds.tolist() == [7, 7, 2**32 - 1]
    assert make_sampling(2, seeds=2**32 - 1).seeds.tolist() == [2**32 - 1, 0], "they wrap around"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": np.ones(3)}, "temperature must be a scalar or [2], a value for each row"),
        ({"temperature": "hot"}, "temperature must be numbers, got 'hot'"),
        ({"temperature": None}, "temperature must be numbers, got None"),
        ({"temperature": np.nan}, "temperature must be at least 0, got nan"),
        ({"top_p": 2.0}, "top_p must be in (0, 1], got 2.0"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"min_p": -0.5}, "min_p must be in [0, 1], got -0.5"),
        ({"min_p": [0.1, 2.0]}, "min_p must be in [0, 1], got 2.0"),
        ({"top_k": -1}, "top_k must be at least 0 (0 keeps all tokens), got -1"),
        ({"top_k": 1.5}, "top_k must be integers, got 1.5"),
        ({"seeds": "a"}, "seeds must be integers, got 'a'"),
        ({"seeds": -3}, "seeds must be 0 to 2**32 - 1, got -3"),
        ({"seeds": 2**32}, "seeds must be 0 to 2**32 - 1, got 4294967296"),
        ({"seeds": jnp.array([1, -1])}, "seeds must be 0 to 2**32 - 1, got -1"),
        ({"seeds": jnp.zeros(3, jnp.uint32)}, "seeds must be a scalar or [2]"),
        (
            {"temperature": -1.0, "top_p": 2.0, "seeds": -3},
            "at least 0, got -1.0; top_p must be in (0, 1], got 2.0; seeds must be 0 to 2**32 - 1",
        ),
    ],
)
def test_sampling_is_checked(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_sampling(2, **options)


def test_numbers_of_rows_and_raw_keys_are_checked():
    with pytest.raises(ValueError, match="batch must be an integer, at least 1, got -1"):
        make_sampling(-1)
    with pytest.raises(ValueError, match="batch must be an integer, at least 1, got 0"):
        make_controls(0, 9)
    with pytest.raises(ValueError, match=r"take jax.random.key where that is a raw PRNGKey"):
        make_sampling(1, seeds=jax.random.PRNGKey(0))


def test_typed_keys_are_seeds():
    key = jax.random.key(7)
    drawn = np.uint32(jax.random.bits(key, dtype=jnp.uint32))
    assert make_sampling(2, seeds=key).seeds.tolist() == [drawn, drawn + np.uint32(1)]
    keys = jax.random.split(key, 2)
    expected = [int(jax.random.bits(one, dtype=jnp.uint32)) for one in keys]
    assert make_sampling(2, seeds=keys).seeds.tolist() == expected
    traced = jax.jit(jax.vmap(lambda one: make_sampling(1, seeds=one).seeds[0]))(keys)
    assert traced.tolist() == expected
