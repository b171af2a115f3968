"""With the Hopper kernels, too, bfloat16 text is that of plain decoding at a fixed width.

At one width verification's attention is the reference, whose sums do not depend on the order of
slots; drafting's and prefill's is the kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.functional import EngineParams
from jaxspec.speculation.drafters import EagleDrafter, NoDrafter
from pallas_kernels.selection import OPERATIONS, Kernels
from tests.random_models import (
    eagle3_head,
    generate,
    random_prompts,
    random_target,
    tiny_config,
)

# What every kernel takes: heads of 128, rows that warpgroups share evenly.
CONFIG = tiny_config(vocab_size=1024, hidden_size=256, intermediate_size=512, head_dim=128)
KERNELS = Kernels(frozenset(OPERATIONS))
WIDTH = 24


@pytest.mark.gpu
@pytest.mark.parametrize(
    "speculation",
    [SpeculationConfig.chain(5), SpeculationConfig(num_nodes=20, max_depth=5, top_k=4)],
    ids=["chain", "tree"],
)
def test_text_is_that_of_plain_decoding(speculation: SpeculationConfig):
    target = random_target(CONFIG)
    head = eagle3_head(target, draft_vocab_size=None)
    target, head = (jax.tree.map(_in_bfloat16, model) for model in (target, head))
    speculation = dataclasses.replace(speculation, verify_width=WIDTH)
    prompts = random_prompts((5, 1, 17, 9, 23, 2, 12, 30), vocab=CONFIG.vocab_size)
    run = functools.partial(generate, prompts=prompts, page_size=16)
    drafting, plain = (
        EngineParams(target=target, drafter=drafter, speculation=speculation, kernels=KERNELS)
        for drafter in (EagleDrafter(head=head), NoDrafter())
    )
    expected, _ = run(plain)
    texts, state = run(drafting)
    assert texts == expected
    stats = state.rows.stats
    assert stats.accepted.sum() / stats.rounds.sum() > 1.2, "hardly a draft was taken"


def _in_bfloat16(x: Any) -> Any:
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
