"""Blocks of draft tokens that see each other in both directions: both kernels, interpreted."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.trees.tree import pack_mask
from pallas_kernels.paged_attention.cases import Case, make_arguments
from tests.kernels import test_paged_attention_kernel as on_gpu
from tests.kernels import test_paged_attention_tpu as on_tpu
from tests.kernels.test_paged_attention_kernel import NARROW

CASE = Case("a block", (200, 3, 64), 16, 8, 2, 128, 16, tree=True)


def block_arguments() -> Any:
    """Every query sees the context and all of the queries' own slots."""
    q, pages, context = make_arguments(CASE, jnp.bfloat16)
    size = CASE.num_tokens
    mask = pack_mask(jnp.ones((len(CASE.context_lens), size, size), bool))
    positions = context.context_lens[:, None] + jnp.arange(size)
    return q, pages, context._replace(positions=positions, ancestors=mask)


@pytest.mark.slow
def test_the_kernel_for_gpus():
    arguments = block_arguments()
    found = on_gpu.interpret(arguments, CASE.options, NARROW)
    assert on_gpu.error(CASE, found, arguments) < 4e-3


@pytest.mark.slow
def test_the_kernel_for_tpus():
    arguments = block_arguments()
    found = on_tpu.attend(CASE, arguments)
    assert on_tpu.error(CASE, found, arguments) < 4e-3


def test_the_first_query_sees_the_last():
    q, pages, context = block_arguments()
    last = int(context.context_lens[1]) + CASE.num_tokens - 1
    page = int(context.page_table[1, last // CASE.page_size])
    changed = pages._replace(v=pages.v.at[page, :, last % CASE.page_size].add(50.0))
    before, after = (
        np.asarray(on_tpu.run_reference(q, layer, context, options=CASE.options), np.float32)
        for layer in (pages, changed)
    )
    assert (np.abs(after - before)[1].max(axis=(-1, -2)) > 0.1).all()
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
