"""What rounds are expected to cost, against rounds that were measured on GPUs."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.decoding.prior_costs import ACCELERATOR, PriorCosts, RoundWork, round_work
from jaxspec.models.linear import Linear
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.float4 import float4_shape
from jaxspec.models.quantized.four_bit_experts import four_bit_experts_shape
from tests.helpers.random_experts import random_expert_target

# Llama-3.1-8B with an EAGLE-3 head of 32,000 draft tokens, and SmolLM2-135M with that of 8,192 that
# comes with jaxspec, in bfloat16 (the head of the second in 8 bits).
LLAMA = RoundWork(
    weights=15_010_000_000,
    operations=15_010_000_000,
    layers=32,
    width=4096,
    vocab=128_256,
    element=2,
    draft_bytes=lambda steps: 2 * (50_300_000 + steps * 374_000_000),
)
SMOLLM2 = RoundWork(
    weights=269_000_000,
    operations=269_000_000,
    layers=30,
    width=576,
    vocab=49_152,
    element=2,
    draft_bytes=lambda steps: 1_000_000 + steps * 9_000_000,
)

# Qwen3.6-35B-A3B, with experts in FP8: a token goes through 8 of 256 and a shared one.
EXPERTS = 40 * 257 * 3 * 2048 * 512
QWEN = RoundWork(
    weights=EXPERTS + 2_500_000_000,
    operations=6_000_000_000,
    layers=40,
    width=2048,
    vocab=248_320,
    element=2,
    draft_bytes=lambda steps: 1_500_000_000,
    experts=EXPERTS,
    chosen=9 / 257,
)


@pytest.mark.parametrize(
    ("work", "chain", "measured"),
    [  # milliseconds of plain rounds and of the chain's, by rows (README.md, real_models.md)
        (LLAMA, 5, {1: (5.60, 7.14), 8: (5.86, 7.85), 32: (6.80, 9.95)}),
        (SMOLLM2, 7, {1: (1.02, 1.28), 8: (0.97, 1.39), 32: (1.02, 1.72)}),
    ],
)
def test_what_chains_cost_is_that_of_the_table(work: RoundWork, chain: int, measured: dict):
    costs = PriorCosts(work, ACCELERATOR)
    for rows, (plain, chained) in measured.items():
        expected = costs.seconds(rows, TreeShape(chain + 1, chain, 1)) / costs.seconds(rows, PLAIN)
        assert expected == pytest.approx(chained / plain, rel=0.125)
        assert 1e3 * costs.seconds(rows, PLAIN) == pytest.approx(plain, rel=0.2)


def test_float32_costs_more_for_each_token_as_it_did_on_an_h200():
    """Rollouts of SmolLM2 (docs/results/rl.md): of 64 rows, and of those few that repair leaves."""
    wide = dataclasses.replace(SMOLLM2, weights=538_000_000, element=4)
    costs = PriorCosts(wide, ACCELERATOR)
    plain, two, seven = PLAIN, TreeShape(3, 2, 1), TreeShape(8, 7, 1)
    assert costs.seconds(64, two) / costs.seconds(64, plain) == pytest.approx(1.54, rel=0.125)
    assert costs.seconds(8, seven) / costs.seconds(8, two) == pytest.approx(1.36, rel=0.125)


def test_more_rows_read_more_experts_as_they_did_on_an_h200():
    """Plain rounds, of two machines (docs/results/experts.md)."""
    costs = PriorCosts(QWEN, ACCELERATOR)
    for rows, measured in {8: 5.62 / 3.38, 32: 12.4 / 3.55}.items():
        expected = costs.seconds(rows, PLAIN) / costs.seconds(1, PLAIN)
        assert expected == pytest.approx(measured, rel=0.2)


def test_what_verified_tokens_cost_is_what_rounds_cost_more():
    """Where reading takes longer than computing."""
    costs = PriorCosts(QWEN, ACCELERATOR)
    nodes = costs.node_costs(4)
    assert nodes is not None
    chain = TreeShape(5, 4, 1)
    seconds = np.array([costs.seconds(1, chain, drafted) for drafted in range(5)])
    assert seconds[4] == costs.seconds(1, chain)
    added = (seconds[4] / seconds[:4] - 1) / (4 - np.arange(4))
    np.testing.assert_allclose(nodes.growth(1, 4), added, rtol=0.1)
    dense = PriorCosts(LLAMA, ACCELERATOR)
    assert dense.node_costs(4) is None
    assert dense.seconds(1, chain, 1.5) == dense.seconds(1, chain)


def test_experts_of_4_bits_multiply_as_others_and_are_read_as_an_eighth():
    dense = random_expert_target()  # in float32

    def packed(linear: ExpertLinear) -> Any:
        shapes = four_bit_experts_shape(linear, "e2m1", 1, jnp.dtype("uint8"))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    ours, theirs = (
        round_work(target, NoDrafter())
        for target in (map_nodes(dense, packed, ExpertLinear), dense)
    )
    mlp: Any = dense.layers[-1].mlp  # the first has no experts
    count, hidden, two, units = mlp.gate_up.weight.shape
    experts, outputs = 3 * count * hidden * units, count * (two * units + hidden)
    assert ours.weights - outputs == theirs.weights - 4 * experts + experts // 2
    scales = 2 * outputs * mlp.config.routing.top_k / count
    assert ours.operations == pytest.approx(theirs.operations + scales, abs=2)
    assert theirs.experts == 4 * experts and theirs.read(1) == theirs.weights - 3 * experts


def test_linears_of_4_bit_floats_multiply_as_others():
    dense = random_expert_target()

    def packed(linear: Linear) -> Any:
        shapes = float4_shape(linear, 1, jnp.dtype("uint8"))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    ours, theirs = (
        round_work(target, NoDrafter()) for target in (map_nodes(dense, packed, Linear), dense)
    )
    scales = sum(math.prod(linear.out_shape) for linear in nodes_of(dense, Linear))
    assert ours.operations == theirs.operations + 2 * scales
