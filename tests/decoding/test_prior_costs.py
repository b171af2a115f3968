"""What rounds are expected to cost, against rounds that were measured on GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.decoding.prior_costs import ACCELERATOR, PriorCosts, RoundWork, round_work
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.nodes import map_nodes
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
