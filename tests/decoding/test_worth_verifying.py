"""Chains that end where the next token is not worth verifying, and that texts stay the same."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import load as loading
from jaxspec.checkpoints.block import save_block_head
from jaxspec.checkpoints.load_drafter import with_node_costs
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.all_reduce_buffers import replacement
from jaxspec.decoding.drafters import MixedDrafter
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.trees.worth_verifying import NodeCosts, worth_verifying
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from pallas_kernels.selection import Kernels
from tests.helpers.block_heads import MASK, block_params, block_target, random_head
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import generate, make_params, random_prompts

# All experts take four times as long to read as the rest of a round; a token chooses a tenth.
COSTS = NodeCosts(fixed=1.0, experts=4.0, chosen=0.1)
PROMPTS = random_prompts((9, 14, 5), seed=8)
DEPTH = 4


def test_a_round_grows_by_the_experts_that_no_token_has_chosen_yet():
    times = []
    for depth in range(4):  # three rows
        unread = 1.0
        for _ in range(3 * (1 + depth)):
            unread *= 1 - 0.1
        times.append(1 + 4 * (1 - unread))
    last = times[3]
    grown = [(last - now) / left / now for now, left in zip(times, (3, 2, 1), strict=False)]
    np.testing.assert_allclose(COSTS.growth(3, 3), grown, rtol=1e-12)
    assert (COSTS.growth(1000, 3) < 1e-9).all()  # all experts are read anyway
    assert (COSTS.growth(16, 7) < 0.06).all()  # nearly all of them


def counted(confidence: np.ndarray, growth: np.ndarray) -> list[int]:
    """Of each row, by the definition."""
    counts = []
    for row in confidence:
        tokens, survival, count = 1.0, 1.0, 0
        for chance, cost in zip(row, growth, strict=True):
            survival *= chance
            if (tokens + survival) / tokens < 1 + cost:
                break
            tokens, count = tokens + survival, count + 1
        counts.append(count)
    return counts


def test_a_chain_ends_before_the_first_token_that_gains_less_than_it_costs():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, size=(200, 6)).astype(np.float32)
    growth = np.array([0.5, 0.2, 0.1, 0.06, 0.035, 0.02])
    found = np.asarray(worth_verifying(jnp.asarray(confidence), growth)).tolist()
    assert found == counted(confidence, growth)
    assert {*found} == {*range(7)}
    free = worth_verifying(jnp.asarray(confidence), np.zeros(6))
    assert (np.asarray(free) == 6).all()


def expert_target() -> Decoder:
    """With a mask that differs from all other tokens: see block_target."""
    target = random_expert_target()
    embed = np.array(target.embed)
    embed[:, 0] = np.where(np.arange(len(embed)) == MASK, -2.0, 2.0)
    return target.replace(embed=jnp.asarray(embed))


def costs_of(drafter: Any, target: Decoder, kernel: str | None) -> NodeCosts | None:
    """Of a drafter that was loaded for a target, where this kernel runs."""
    kernels = Kernels(frozenset([kernel] if kernel else []))
    known: Any = with_node_costs(drafter, target, DEPTH, kernels)
    return getattr(known, "model", known).costs


def test_a_loaded_head_knows_what_the_experts_of_its_target_cost():
    target = expert_target()
    params = block_params("dspark", SpeculationConfig.chain(DEPTH), target, confidence=True)
    drafter: Any = params.drafter
    costs = costs_of(drafter, target, "expert_product")
    assert costs is not None and costs.chosen == 2 / 8
    assert 0 < costs.experts < costs.fixed  # of a CPU, whose layers take their time
    assert costs_of(MixedDrafter(model=drafter), target, "expert_product") == costs
    unsure = drafter.replace(head=drafter.head.replace(confidence=None))
    assert costs_of(unsure, target, "expert_product") is None
    assert costs_of(drafter, block_target(), "expert_product") is None  # it has no experts
    for other in (None, "packed_expert_product"):  # the latter is of experts in fewer bits
        assert costs_of(drafter, target, other) is None


def test_load_asks_for_the_costs_of_the_target_that_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = loading.load(drafter="none").target
    head = random_head(target.config, "dspark", layers=1, confidence=True)
    save_block_head(head, tmp_path, target)

    def known(drafter: Any, target: Decoder, depth: int, kernels: Kernels) -> Any:
        costs = NodeCosts(float(len(target.layers)), float(depth), float(len(kernels.operations)))
        return drafter.replace(costs=costs)

    monkeypatch.setattr(loading, "with_node_costs", known)
    loaded: Any = loading.load(drafter=tmp_path, speculation=SpeculationConfig.chain(3)).drafter
    assert loaded.costs == NodeCosts(len(target.layers), 3, 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_other_weights_of_a_head_keep_the_costs_in_use(mixed: bool):
    params = block_params(
        "dspark", SpeculationConfig.chain(DEPTH), expert_target(), confidence=True
    )
    new: Any = params.drafter
    current = new.replace(costs=COSTS)
    if mixed:
        new, current = MixedDrafter(model=new), MixedDrafter(model=current)
    used: Any = replacement(current, new)
    assert getattr(used, "model", used).costs == COSTS
    back: Any = replacement(new, current)  # from an engine of another target
    assert getattr(back, "model", back).costs is None


def with_costs(params: EngineParams, costs: NodeCosts | None) -> EngineParams:
    drafter: Any = params.drafter
    if hasattr(drafter, "model"):  # a mixture
        return params.replace(drafter=drafter.replace(model=drafter.model.replace(costs=costs)))
    return params.replace(drafter=drafter.replace(costs=costs))


def drafted(params: EngineParams, temperature: float) -> tuple[list[list[int]], np.ndarray]:
    """Texts, and the mean number of verified tokens of a round of each."""
    sampling = make_sampling(len(PROMPTS), temperature=temperature, seeds=np.arange(3))
    texts, state = generate(params, PROMPTS, sampling=sampling)
    rounds, tokens = np.asarray(state.rows.stats.counts).T[:2]
    return texts, tokens / rounds


# By default tests/decoding/test_acceptance.py commits such chains' tokens, without a model.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "temperature"), [("dspark", 0.8), ("dspark", 0.0), ("ngram+dspark", 0.8)]
)
def test_texts_are_those_of_plain_decoding(kind: str, temperature: float):
    target = expert_target()
    params = block_params(kind, SpeculationConfig.chain(DEPTH), target, confidence=True)
    plain = make_params("none", SpeculationConfig.chain(0)).replace(target=target)
    texts, tokens = drafted(with_costs(params, COSTS), temperature)
    assert texts == drafted(plain, temperature)[0]
    assert (tokens > 0.3).all() and (tokens < DEPTH - 0.3).all()
