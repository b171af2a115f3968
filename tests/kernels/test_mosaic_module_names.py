"""The same kernel has the same bytes, whatever was lowered before it."""

import functools
import re
from pathlib import Path

import jax
import pytest

from pallas_kernels import benchmark
from pallas_kernels.add_rms_norm import cases as add_rms_norm
from pallas_kernels.delta_rule import cases as delta_rule
from pallas_kernels.expert_product import cases as expert_product
from pallas_kernels.kv_compact import cases as kv_compact
from pallas_kernels.latent_attention import cases as latent_attention
from pallas_kernels.packed_product import cases as packed_product
from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.rope_kv_write import cases as rope_kv_write
from pallas_kernels.top_k import cases as top_k
from pallas_kernels.truncate import cases as truncate
from tests.helpers.marks import slow

MODULES = (
    add_rms_norm,
    delta_rule,
    expert_product,
    kv_compact,
    latent_attention,
    packed_product,
    paged_attention,
    rope_kv_write,
    top_k,
    truncate,
)


# Those that are lowered most quickly. Of the others test_every_kernel_has_a_fixed_name finds the
# names, which are what makes the bytes the same.
FAST = (rope_kv_write, top_k)


@pytest.mark.parametrize(
    "cases",
    [cases if cases in FAST else slow(cases) for cases in MODULES],
    ids=lambda cases: cases.__name__.split(".")[-2],
)
def test_it_is_lowered_alike_twice(cases, monkeypatch):
    monkeypatch.setattr(benchmark, "implementation_to_time", lambda: "mosaic_gpu")
    one = cases.benchmarks()[0]
    arguments = jax.eval_shape(functools.partial(one.make_arguments, 0))

    def lowered() -> str:
        jax.clear_caches()
        return jax.jit(one.call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    first = lowered()
    assert "mosaic_gpu" in first
    assert first == lowered()


def test_every_kernel_has_a_fixed_name():
    """Those, too, that have no cases to lower here."""
    found = []
    for path in Path(benchmark.__file__).parent.glob("*/mosaic_gpu.py"):
        source = path.read_text()
        bodies = re.findall(r"(.*)\n +def ([a-z]\w*_kernel)\(", source)
        assert bodies or "plgpu.kernel" not in source, path  # or another operation's kernel
        found += bodies
    assert [name for line, name in found if "@fixed_name(" not in line] == []
    assert {"round_tokens_kernel", "reduce_add_rms_norm_kernel"} <= {name for _, name in found}
