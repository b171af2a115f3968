"""What drafting reads in a round. (tests/evaluation/benchmarks has the floors of heads, which are
made of it.)"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding.draft_bytes import draft_weight_bytes, head_passes
from jaxspec.decoding.drafters import (
    DraftModelDrafter,
    EagleDrafter,
    MixedDrafter,
    NGramDrafter,
    NoDrafter,
)
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.quantized.scaled import in_eight_bits
from jaxspec.parallel.bytes import local_bytes
from tests.helpers.sizes import decoder_of_zeros, head_of_zeros, zeros

TINY, FLOAT32 = SHAPES["tiny"], jnp.dtype("float32")


def test_passes_of_several_heads():
    assert head_passes(1, 3) == [(3, 0)]
    assert head_passes(2, 2) == [(1, 0), (1, 1)]
    assert head_passes(3, 5) == [(1, 0), (2, 0), (3, 2)]
    assert head_passes(3, 2) == [(1, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_reads_its_embeddings_only_as_lm_head(tied: bool):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    model = decoder_of_zeros(config, FLOAT32)
    assert (model.lm_head is None) == tied
    once = local_bytes(model) - (0 if tied else local_bytes(model.embed))
    assert draft_weight_bytes(DraftModelDrafter(model=model), 4, lm_head=10) == 4 * once


def test_a_mixture_reads_what_its_model_does():
    drafter = EagleDrafter(head=head_of_zeros(TINY, FLOAT32))
    mixed = MixedDrafter(model=drafter)
    found = draft_weight_bytes(mixed, 3, lm_head=10)
    assert found == draft_weight_bytes(drafter, 3, lm_head=99) > 0, "it has an LM head of its own"


@pytest.mark.parametrize("drafter", [NoDrafter(), NGramDrafter()])
def test_lookup_reads_none(drafter):
    assert draft_weight_bytes(drafter, 5, lm_head=10) == 0


def test_of_weights_in_two_sizes_the_smaller_ones_count():
    drafter = DraftModelDrafter(model=decoder_of_zeros(TINY, FLOAT32))
    rounded = zeros(jax.eval_shape(in_eight_bits, drafter))
    wide, small = (draft_weight_bytes(one, 1, 0) for one in (drafter, rounded))
    assert 0.25 < small / wide < 0.3
