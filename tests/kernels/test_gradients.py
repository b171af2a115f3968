"""Kernels have the gradients of their references.

A program of the gradient alone holds no kernel, so it runs on a CPU too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm import cases as norm
from pallas_kernels.expert_product import cases as experts
from pallas_kernels.expert_product import expert_product
from pallas_kernels.latent_attention import cases as latent
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.packed_product import cases as packed
from pallas_kernels.packed_product import packed_product
from pallas_kernels.paged_attention import cases as attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import cases as rope
from pallas_kernels.rope_kv_write import rope_kv_write
from tests.helpers.marks import slow

NORMED = next(case for case in rope.TEST_CASES if case.norms)
LATENT = latent.KERNEL_CASES[3]


def of_attention(case: attention.Case) -> Any:
    arguments = functools.partial(attention.make_arguments, case)
    return functools.partial(paged_attention, options=case.options), arguments


ONE_QUERY, TREE = (of_attention(attention.KERNEL_CASES[place]) for place in (0, 4))
# The kernel, what it is called with but for a dtype, and the places of what is differentiated.
CALLS = [
    slow("mosaic_gpu", *ONE_QUERY, (0,), id="attention, one query"),
    slow("mosaic_gpu", *TREE, (0,), id="attention, a tree"),
    pytest.param("mosaic_tpu", *ONE_QUERY, (0,), id="attention on a TPU"),
    slow(
        "mosaic_gpu",
        functools.partial(latent_attention, **LATENT.options),
        functools.partial(latent.make_arguments, LATENT),
        (0,),
        id="latent attention",
    ),
    pytest.param(
        "mosaic_gpu",
        functools.partial(add_rms_norm, eps=norm.EPS),
        functools.partial(norm.make_arguments, norm.TEST_CASES[0]),
        (0, 1, 2),
        id="norm",
    ),
    slow(
        "mosaic_gpu",
        functools.partial(rope_kv_write, eps=rope.EPS),
        functools.partial(rope.make_arguments, NORMED),
        (0, 2, 3),
        id="rotation",
    ),
    slow(
        "mosaic_gpu",
        packed_product,
        functools.partial(packed.make_arguments, packed.Case(3, 256, 128)),
        (0, 2),
        id="product",
    ),
    slow(
        "mosaic_gpu",
        expert_product,
        functools.partial(experts.make_arguments, experts.Case(3, 2, 4, 128, 64)),
        (0, 2, 3),
        id="experts",
    ),
]


@pytest.mark.parametrize(("backend", "function", "make_arguments", "places"), CALLS)
def test_a_kernel_has_its_references_gradient(
    backend: str, function: Any, make_arguments: Any, places: tuple[int, ...]
):
    arguments: Any = make_arguments(jnp.bfloat16)

    def gradients(implementation: str) -> Any:
        def total(*arguments: Any) -> jax.Array:
            outputs = jax.tree.leaves(function(*arguments, implementation=implementation))
            return jnp.stack([(out.astype(jnp.float32) ** 2).sum() for out in outputs]).sum()

        return jax.tree.leaves(jax.grad(total, argnums=places)(*arguments))

    for found, expected in zip(gradients(backend), gradients("reference"), strict=True):
        np.testing.assert_array_equal(found, expected)
