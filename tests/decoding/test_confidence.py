"""What a drafter thinks of its chains: emitted if a call asks for it, and else not computed."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.heads import BlockHead
from jaxspec.parallel import make_mesh
from tests.helpers.block_heads import block_params, block_target, random_head
from tests.helpers.layouts import on_mesh
from tests.helpers.programs import new_jit
from tests.helpers.random_models import empty_state, padded, random_prompts, tiny_config

CHAIN = SpeculationConfig.chain(3)
TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=3)


@functools.cache
def head_of(*, confidence: bool) -> BlockHead:
    return random_head(block_target().config, "dspark", layers=1, confidence=confidence)


def params_of(speculation: SpeculationConfig = CHAIN, *, confidence: bool = True) -> EngineParams:
    drafter = BlockDrafter(head=head_of(confidence=confidence))
    return EngineParams(target=block_target(), drafter=drafter, speculation=speculation)


def traced(params: EngineParams, **options: Any) -> Any:
    """The decode program, traced."""
    decode = functools.partial(functional.decode, max_rounds=3, **options)
    return jax.jit(decode).trace(params, empty_state(params, 3, 40, 4), 3)


def lowered(params: EngineParams, **options: Any) -> str:
    """The decode program as XLA gets it."""
    return traced(params, **options).lower().as_text()


def emitted(params: EngineParams, **options: Any) -> Any:
    return traced(params, confidence=True, **options).out_info[1].confidence


def test_chains_have_a_confidence_for_each_depth():
    assert emitted(params_of()).shape == (3, 3, 3)
    assert emitted(params_of(), shape=TreeShape.parse("chain:2")).shape == (3, 3, 2)


def test_other_trees_have_none():
    assert emitted(params_of(TREE)) is None
    assert emitted(params_of(), shape=PLAIN) is None


def test_a_drafter_without_a_confidence_head_is_refused():
    for params in (
        params_of(confidence=False),
        block_params("ngram+dspark", CHAIN, confidence=True),
    ):
        with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
            traced(params, confidence=True)


def test_a_call_that_does_not_ask_runs_the_program_of_a_head_without_one():
    with_head, without = (params_of(confidence=told) for told in (True, False))
    plain = lowered(without)
    assert lowered(with_head) == plain
    assert lowered(with_head, confidence=True) != plain


@pytest.mark.slow
def test_rows_on_several_devices_have_the_confidence_of_one():
    target = block_target(tiny_config(num_heads=8))
    params = block_params("dspark", CHAIN, target, confidence=True)
    prompts = random_prompts((5, 9, 3, 7))

    def run(params: EngineParams) -> np.ndarray:
        tokens, lens = padded(prompts, 9), np.array([len(prompt) for prompt in prompts])
        state = functional.init_state(params, 4, 40, page_size=4)
        state = new_jit(functional.admit)(params, state, np.arange(4), tokens, lens)
        state, _ = new_jit(functional.prefill, "width")(params, state, width=9)
        decode = new_jit(functional.decode, "max_rounds", "confidence")
        emitted = decode(params, state, 4, max_rounds=4, confidence=True)[1]
        return np.asarray(emitted.confidence)

    one = run(params)
    assert np.ptp(one, axis=(0, 2)).min() > 0.1
    np.testing.assert_allclose(run(on_mesh(params, make_mesh(2, 2))), one, rtol=0, atol=1e-4)
