"""Both kernels of paged attention, interpreted: blocks of draft tokens that see each other in both
directions, and scaled scores."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.trees.tree import pack_mask
from pallas_kernels.paged_attention import mosaic_gpu as gpu
from pallas_kernels.paged_attention import mosaic_tpu as tpu
from pallas_kernels.paged_attention.cases import KERNEL_CASES, Case, make_arguments
from pallas_kernels.paged_attention.tuning import AttentionTuning
from tests.helpers.kernels import attention_error, interpreted, run_reference

NARROW = AttentionTuning(block=64, stages=2)
CASE = Case("a block", (200, 3, 64), 16, 8, 2, 128, 16, tree=True)


def block_arguments() -> Any:
    """Every query sees the context and all of the queries' own slots."""
    q, pages, context = make_arguments(CASE, jnp.bfloat16)
    size = CASE.num_tokens
    mask = pack_mask(jnp.ones((len(CASE.context_lens), size, size), bool))
    positions = context.context_lens[:, None] + jnp.arange(size)
    return q, pages, context._replace(positions=positions, ancestors=mask)


# Each kernel of paged attention, interpreted.
KERNELS = {
    "gpu": functools.partial(interpreted, gpu.paged_attention_mosaic, config=NARROW),
    "tpu": functools.partial(tpu.paged_attention_mosaic, interpret=True),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.slow
@each_kernel
def test_a_block_sees_itself(kernel: str):
    arguments = block_arguments()
    found = KERNELS[kernel](*arguments, options=CASE.options)
    assert attention_error(CASE, found, arguments) < 4e-3


@pytest.mark.slow
@each_kernel
def test_scores_may_have_another_scale(kernel: str):
    """With twice the usual scale, it is what it is for twice the queries."""
    case = next(case for case in KERNEL_CASES if case.name == "K: window under a tree")
    q, *others = make_arguments(case, jnp.bfloat16)
    doubled = dataclasses.replace(case.options, scale=2 * case.head_dim**-0.5)
    scaled = KERNELS[kernel](q, *others, options=doubled)
    assert jnp.array_equal(scaled, KERNELS[kernel](2 * q, *others, options=case.options))


def test_the_first_query_sees_the_last():
    q, pages, context = block_arguments()
    last = int(context.context_lens[1]) + CASE.num_tokens - 1
    page = int(context.page_table[1, last // CASE.page_size])
    changed = pages._replace(v=pages.v.at[page, :, last % CASE.page_size].add(50.0))
    before, after = (
        np.asarray(run_reference(q, layer, context, options=CASE.options), np.float32)
        for layer in (pages, changed)
    )
    assert (np.abs(after - before)[1].max(axis=(-1, -2)) > 0.1).all()
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
