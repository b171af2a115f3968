"""Seeds of groups: functions of key, prompt and epoch, different within a prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import group_seeds

IDS = np.array([3, 900, 3, -5, 2**40 + 3])


def test_they_depend_on_prompt_key_and_epoch_alone():
    seeds = np.asarray(group_seeds(7, IDS, 4))
    assert seeds.dtype == np.uint32 and seeds.shape == (5, 4)
    assert len({*seeds[[0, 1, 3]].flat}) == 12
    np.testing.assert_array_equal(seeds[0], seeds[2])
    np.testing.assert_array_equal(seeds[0], seeds[4])  # ids of the same last 32 bits
    np.testing.assert_array_equal(group_seeds(7, IDS[1:2], 2)[0], seeds[1, :2])
    others = group_seeds(7 + 2**32, IDS, 4), group_seeds(7, IDS, 4, epoch=1)
    others = [seeds, *others, group_seeds(jax.random.key(7), IDS, 4)]
    assert len({*np.array(others)[:, 0, 0].tolist()}) == 4


def test_all_of_a_prompt_differ():
    many = np.asarray(group_seeds(2**64 - 1, np.arange(3), 50_000))
    assert all(len(np.unique(row)) == 50_000 for row in many)


def test_traced_values_give_the_same():
    traced = jax.jit(lambda key, ids, epoch: group_seeds(key, ids, 3, epoch=epoch))
    ids = jnp.array([3, 900])
    np.testing.assert_array_equal(traced(7, ids, 2), group_seeds(7, [3, 900], 3, epoch=2))
    key = jax.random.key(1)
    np.testing.assert_array_equal(traced(key, ids, 0), group_seeds(key, ids, 3))


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="num_samples must be an integer, at least 1, got 0"):
        group_seeds(1, IDS, 0)
    with pytest.raises(ValueError, match=r"key must be integers, got 0\.5"):
        group_seeds(0.5, IDS, 1)
    with pytest.raises(ValueError, match=r"key must be 0 to 2\*\*64 - 1, got -1"):
        group_seeds(-1, IDS, 1)
    with pytest.raises(ValueError, match="where that is a raw PRNGKey"):
        group_seeds(jax.random.PRNGKey(1), IDS, 1)
    with pytest.raises(ValueError, match=r"got keys of shape \[2\]"):
        group_seeds(jax.random.split(jax.random.key(1)), IDS, 1)
    with pytest.raises(ValueError, match=r"got shapes \[\] and \[\]"):
        group_seeds(1, 5, 1)
