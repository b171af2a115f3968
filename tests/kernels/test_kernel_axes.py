"""No axis of a device mesh is read in place of an axis of a kernel."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import benchmark
from pallas_kernels.paged_attention import cases

NAMES = ("sequence", "kv_heads", "row_block", "split", "warpgroup")  # of axes of paged_attention
SOURCES = sorted(Path(benchmark.__file__).parent.glob("*/*.py"))


def test_a_mesh_axis_that_is_called_like_a_kernels_changes_nothing(monkeypatch):
    monkeypatch.setattr(benchmark, "implementation_to_time", lambda: "mosaic_gpu")
    timed = cases.benchmarks()[0]
    arguments = jax.eval_shape(functools.partial(timed.make_arguments, 0))
    devices = np.array(jax.devices()[:2]).reshape(2, *(1,) * (len(NAMES) - 1))

    def lowered(names: tuple[str, ...]) -> str:
        call = jax.shard_map(
            timed.call, mesh=Mesh(devices, names), in_specs=P(), out_specs=P(), check_vma=False
        )
        traced = jax.jit(call).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    others = tuple(f"mesh_{name}" for name in NAMES)
    text, expected = lowered(NAMES), lowered(others)
    assert "mosaic_gpu" in text
    for name, other in zip(NAMES, others, strict=True):
        expected = expected.replace(f'"{other}"', f'"{name}"')
    assert text == expected


@pytest.mark.parametrize(
    "pattern",
    [
        r'axis_index\(\s*"',
        r"(?:grid_names|cluster_names|thread_name)=(?!kernel_axes\.)",
        r'cluster_ref\([^{]*\{"',
    ],
    ids=["index", "grid", "cluster"],
)
def test_kernels_name_their_axes_by_kernel_axes(pattern: str):
    assert len(SOURCES) > 50
    found = [path for path in SOURCES if re.search(pattern, path.read_text())]
    assert not found
