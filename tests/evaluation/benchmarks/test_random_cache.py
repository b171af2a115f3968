"""Random numbers in place of what reading a prompt leaves in the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import ModelState, PagedKV
from jaxspec.decoding.state import Pool
from jaxspec.evaluation.benchmarks.random_cache import with_random_pages
from jaxspec.parallel import WHOLE
from pallas_kernels.float8 import decode


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_all_pages_are_finite_numbers_and_nothing_else_changes(dtype: str):
    def layer() -> PagedKV:
        return PagedKV(k=jnp.zeros((9, 2, 16, 8), dtype), v=jnp.zeros((9, 2, 16, 8), dtype))

    kept = jnp.arange(3)
    pool = Pool(
        target=ModelState(layers=(layer(), None), layout=WHOLE),
        draft={"pages": layer(), "other": kept},
        page_size=16,
        num_pages=9,
        num_rows=1,
    )
    shapes = [x.shape for x in jax.tree.leaves(pool)]
    found = with_random_pages(pool)
    assert [x.shape for x in jax.tree.leaves(found)] == shapes
    assert found.draft["other"] is kept
    for pages in (found.target.layers[0], found.draft["pages"]):
        for x in (pages.k, pages.v):
            numbers = np.asarray(x if dtype == "float32" else decode(x, jnp.float32))
            assert np.isfinite(numbers).all() and numbers.std() > 0.1
