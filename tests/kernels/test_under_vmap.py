"""Kernels inside the caller's vmap: lowered, and (with `-m gpu`) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm import cases as norm_cases
from pallas_kernels.kv_compact import cases as compact_cases
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import cases as rope_cases
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.top_k import cases as top_k_cases
from pallas_kernels.top_k import top_k
from pallas_kernels.truncate import cases as truncate_cases
from pallas_kernels.truncate import truncation_threshold

KERNEL: Any = "mosaic_gpu"
ATTENTION = attention_cases.KERNEL_CASES[4]
COMPACT = compact_cases.TEST_CASES[0]
CALLS = {
    "paged_attention": (
        functools.partial(paged_attention, options=ATTENTION.options, implementation=KERNEL),
        functools.partial(attention_cases.make_arguments, ATTENTION, jnp.bfloat16),
    ),
    "rope_kv_write": (
        functools.partial(rope_kv_write, eps=1e-5, implementation=KERNEL),
        functools.partial(rope_cases.make_arguments, rope_cases.TEST_CASES[1], jnp.bfloat16),
    ),
    "add_rms_norm": (
        functools.partial(add_rms_norm, eps=1e-5, implementation=KERNEL),
        functools.partial(norm_cases.make_arguments, norm_cases.TEST_CASES[1], jnp.bfloat16),
    ),
    "kv_compact": (
        functools.partial(kv_compact, implementation=KERNEL),
        functools.partial(compact_cases.make_arguments, COMPACT, jnp.bfloat16),
    ),
    "top_k": (
        functools.partial(top_k, k=4, implementation=KERNEL),
        functools.partial(top_k_cases.make_arguments, top_k_cases.Case(3, 8192, 4)),
    ),
    "truncate": (
        functools.partial(truncation_threshold, implementation=KERNEL),
        functools.partial(truncate_cases.make_arguments, truncate_cases.LARGE_CASES[0]),
    ),
}

FIRST_PAGES = {"rope_kv_write": 1, "kv_compact": 0}  # results from there on are pages


@pytest.mark.parametrize("name", CALLS)
def test_it_lowers_for_cuda(name: str):
    call, make_arguments = CALLS[name]
    stacked = jax.eval_shape(lambda: stack([make_arguments(seed=seed) for seed in (0, 1)]))
    traced = jax.jit(jax.vmap(call)).trace(*stacked)
    assert traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_the_device_it_equals_separate_calls(name: str):
    call, make_arguments = CALLS[name]
    arguments = [make_arguments(seed=seed) for seed in range(3)]
    together = jax.jit(jax.vmap(call))(*stack(arguments))
    alone = stack([jax.jit(call)(*own) for own in arguments])
    first_pages = FIRST_PAGES.get(name, len(jax.tree.leaves(alone)))
    pairs = zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True)
    for index, (found, wanted) in enumerate(pairs):
        seen = slice(1 if index >= first_pages else 0, None)  # nobody reads the null page
        np.testing.assert_array_equal(
            found[:, seen].astype(jnp.float32), wanted[:, seen].astype(jnp.float32)
        )


def stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
