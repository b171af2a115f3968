"""Shapes of rope_kv_write that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import Benchmark, beside_reference, float8_noise, noise
from pallas_kernels.pages import LayerPages
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.rope_kv_write.reference import HeadNorms

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """``group`` query heads per KV head; ``norms``: norm queries and keys before the rotation.
    ``pairs``: of entries that are rotated; None: all."""

    batch: int
    num_tokens: int
    kv_heads: int
    group: int
    head_dim: int = 128
    page_size: int = 64
    num_splits: int = 1
    norms: bool = False
    pairs: int | None = None

    def __str__(self) -> str:
        width = f", heads of {self.head_dim}" if self.head_dim != 128 else ""
        partials = f", {self.num_splits} partial sums" if self.num_splits > 1 else ""
        pairs = f", {self.pairs} pairs" if self.pairs else ""
        norms = ", norms" if self.norms else ""
        return f"{self.batch} x {self.num_tokens}{width}{partials}{norms}{pairs}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the partial sums and the results. Angles are left out: they are few, and all
        layers share them."""
        rows = self.batch * self.num_tokens * self.kv_heads * (self.group + 2)
        return rows * self.head_dim * (2 + (2 if self.num_splits == 1 else 4 * self.num_splits))


TEST_CASES = (
    Case(1, 1, 2, 4),
    Case(2, 3, 2, 1, page_size=16, num_splits=4),
    Case(3, 5, 1, 7, page_size=8, norms=True),
    Case(2, 3, 2, 2, 256, page_size=16, num_splits=2, norms=True),
    Case(2, 3, 2, 4, 256, norms=True, pairs=32),
    Case(1, 3, 2, 3, num_splits=2, pairs=48),
)
BENCHMARK_CASES = tuple(
    Case(batch, num_tokens, 8, 4, num_splits=num_splits)
    for batch, num_tokens, num_splits in ((1, 1, 1), (1, 6, 4), (8, 6, 4), (32, 6, 1), (1, 2048, 1))
) + tuple(  # Qwen3.5-9B, whose heads have norms and are rotated in part
    Case(batch, num_tokens, 4, 4, 256, num_splits=num_splits, norms=True, pairs=32)
    for batch, num_tokens, num_splits in ((1, 1, 1), (1, 16, 4), (32, 6, 1))
)


def make_arguments(case: Case, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, ...]:
    """Positional arguments of rope_kv_write. The last token is padding: its slot is in page 0."""
    rng = np.random.default_rng(seed)
    tokens = (case.batch, case.num_tokens)
    slots_needed = 1 + case.batch * case.num_tokens
    num_pages = 2 + slots_needed // case.page_size
    pool = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    rows = case.batch + (case.batch == 1)  # a padding row
    heads = (case.num_splits, rows, *tokens[1:], case.kv_heads, case.group + 2, case.head_dim)
    angles = 10 * rng.standard_normal((*tokens, case.pairs or case.head_dim // 2), np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    rope = np.stack([np.stack([cos, cos], axis=2), np.stack([-sin, sin], axis=2)], axis=2)
    places = rng.permutation(np.arange(case.page_size, num_pages * case.page_size))
    slots = places[: case.batch * case.num_tokens].reshape(tokens).astype(np.int32)
    slots[-1, -1] = 0
    q_norm, k_norm = (
        1 + 0.1 * noise(seed, index, (case.head_dim,), dtype) if case.norms else None
        for index in (0, 1)
    )
    return (
        noise(seed, 2, heads, dtype if case.num_splits == 1 else jnp.float32),
        jnp.asarray(rope),
        HeadNorms(q_norm, k_norm),
        LayerPages(noise(seed, 3, pool, dtype), noise(seed, 4, pool, dtype)),
        jnp.asarray(slots),
    )


def make_float8_arguments(case: Case, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of ``make_arguments`` with pages of bytes and their scales."""
    *before, pages, slots = make_arguments(case, dtype, seed)
    (k, k_scale), (v, v_scale) = (float8_noise(seed, index, pages.k.shape) for index in (5, 6))
    return *before, LayerPages(k, v, k_scale, v_scale), slots


def benchmarks() -> Sequence[Benchmark]:
    """Each call gets the pages of the call before, so that they are updated in place."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(rope_kv_write, eps=EPS),
            lambda arguments, output: (*arguments[:3], LayerPages(*output[1:]), arguments[4]),
            flops=6 * case.batch * case.num_tokens * case.kv_heads * case.group * case.head_dim,
        )
        for case in BENCHMARK_CASES
    ]
