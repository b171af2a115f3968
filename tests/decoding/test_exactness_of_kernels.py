"""With the Hopper kernels, too, bfloat16 text is that of plain decoding at a fixed width.

At one width verification's attention is the reference, whose sums do not depend on the order of
slots; drafting's and prefill's is the kernel. Deterministic engines read prompts with the
reference, too.
"""

import dataclasses
import functools

import pytest

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter, Drafter, EagleDrafter, NoDrafter
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from pallas_kernels.selection import OPERATIONS, Kernels
from tests.engine.test_deterministic import MAX_LENGTH, bfloat16, requests, run_alone, run_together
from tests.helpers.block_heads import KINDS, block_target, guessing_head
from tests.helpers.random_models import (
    eagle3_head,
    generate,
    random_prompts,
    random_target,
    tiny_config,
)

# What every kernel takes: heads of 128, rows that warpgroups share evenly.
SIZES = {"vocab_size": 1024, "intermediate_size": 512}
CONFIG = tiny_config(**SIZES, hidden_size=256, head_dim=128)
KERNELS = Kernels(frozenset(OPERATIONS))
WIDTH = 24
PAGE, FEW = 16, 12  # pages, too few for four rows
SHAPES = {
    "chain": SpeculationConfig.chain(5),
    "tree": SpeculationConfig(num_nodes=20, max_depth=5, top_k=4),
}


def both(
    target: Decoder, drafter: Drafter, speculation: SpeculationConfig, kernels: Kernels
) -> tuple[EngineParams, EngineParams]:
    """Of plain decoding and of the drafter, both in bfloat16 and padded to WIDTH nodes."""
    speculation = dataclasses.replace(speculation, verify_width=WIDTH)
    plain, drafting = (
        bfloat16(EngineParams(target=target, drafter=own, speculation=speculation, kernels=kernels))
        for own in (NoDrafter(), drafter)
    )
    return plain, drafting


def check_text(
    target: Decoder, drafter: Drafter, speculation: SpeculationConfig, kernels: Kernels
) -> None:
    prompts = random_prompts((5, 1, 17, 9, 23, 2, 12, 30), vocab=CONFIG.vocab_size)
    run = functools.partial(generate, prompts=prompts, page_size=PAGE)
    plain, drafting = both(target, drafter, speculation, kernels)
    expected, _ = run(plain)
    texts, state = run(drafting)
    assert texts == expected
    stats = state.rows.stats
    assert stats.accepted.sum() / stats.rounds.sum() > 1.2, "hardly a draft was taken"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_text_is_that_of_plain_decoding(head_dim: int, shape: str):
    target = random_target(tiny_config(**SIZES, hidden_size=2 * head_dim, head_dim=head_dim))
    head = eagle3_head(target, draft_vocab_size=None)
    check_text(target, EagleDrafter(head=head), SHAPES[shape], KERNELS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*KINDS, "windowed"])
def test_text_of_block_heads_is_that_of_plain_decoding(kind: str, shape: str):
    target = block_target(CONFIG, mark=8.0)
    drafter = BlockDrafter(head=guessing_head(target, kind))
    check_text(target, drafter, SHAPES[shape], measured_kernels())


def measured_kernels() -> Kernels:
    """Those of ``--kernels auto``."""
    kernels = Kernels.for_device()
    assert "paged_attention" in kernels, "not a Hopper GPU"
    return kernels


# Deterministic engines: prompts that begin alike, and too few pages.


def check_engines(plain: EngineParams, drafting: EngineParams) -> None:
    """Tokens and log-probabilities, to the last bit: alone and plain, and drafted together."""
    config = EngineConfig(max_rows=4, rounds_per_call=4, deterministic=True)
    prompts, sampling = requests(24)
    unshared = dataclasses.replace(config, prefix_caching=False)
    expected = run_alone(Engine(plain, CacheConfig(PAGE, MAX_LENGTH), unshared), prompts, sampling)
    own = Engine(drafting, CacheConfig(PAGE, MAX_LENGTH, FEW), config)
    for seed in range(2):  # the second time all prompts are cached
        assert run_together(own, prompts, sampling, seed) == expected
    assert own.scheduler.preemptions["swap"] > 0
    assert own.scheduler.cache_statistics()[1] > 0, "no prompt was in the prefix cache"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_block_heads_change_no_text_with_prefix_hits_and_swaps(kind: str, shape: str):
    target, kernels = block_target(CONFIG, mark=8.0), measured_kernels()
    drafter = BlockDrafter(head=guessing_head(target, kind))
    plain, drafting = both(target, drafter, SHAPES[shape], kernels)
    check_engines(plain, drafting)
