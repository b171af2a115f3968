"""Benchmarks of the gated delta rule at small sizes."""

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.delta_rule.cases import (
    BENCHMARK_ROUNDS,
    KEPT,
    Case,
    Round,
    read_benchmark,
    round_benchmark,
    run_benchmark,
)
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

TREE = Round(Case(2, 9, groups=2, v_dim=8, capacity=4, k_dim=16), (1, 3, 3, 2), pool=4)
# A round is a read and a commit; what a read hands on, and what a run does, is tested by default.
KINDS = (read_benchmark, slow(round_benchmark), run_benchmark)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=2e-5
        )


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_calls_hand_on_what_the_next_ones_take(make):
    benchmark = make(TREE)
    arguments = benchmark.make_arguments(0)
    output = jax.jit(benchmark.call, compiler_options=FAST_COMPILE)(*arguments)
    following = benchmark.feed(arguments, output)
    for one, other in zip(following, arguments, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert following[KEPT - 2].tolist() == [2, 3]  # rows
    reference = jax.jit(benchmark.reference, compiler_options=FAST_COMPILE)
    assert_close(output, reference(*arguments))


def test_bytes_of_a_round():
    """Of one row: 2 MiB of state, a window of 16 tokens of 24 KiB and some, 8 KiB of channels."""
    one = next(b for b in BENCHMARK_ROUNDS if (b.case.batch, b.case.nodes) == (1, 4))
    state, token, channels = 32 * 128 * 128 * 4, 4 * 16 * (128 + 2 * 130), 16 * 512 * 2
    node = token + 4 * (16 + 32) * 128
    assert one.case.num_bytes == state + 8 * token + 4 * node
    accepted = 2 * (2 * state + 16 * token) // 16 + 2 * 2 * token + (6 + 2) * channels
    assert one.case.commit_bytes(one.accepted) == accepted
