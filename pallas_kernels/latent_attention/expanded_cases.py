"""Chunks of prompts over pages of latents, to be timed in both ways of attending to them.

In the engine `LatentConfig.expands` chooses by the number of multiplications.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, implementation_to_time, noise
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.cases import SCALE, LatentCase, feed_lengths
from pallas_kernels.latent_attention.expanded import expanded_attention
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.pages import QueryContext
from pallas_kernels.products import einsum_f32
from pallas_kernels.selection import Implementation


@dataclasses.dataclass(frozen=True)
class ExpandedCase(LatentCase):
    """One call: as one of latent attention, with a key and a value of each head.

    Attributes:
      key_dim: entries of a key that are not rotated.
      value_dim: entries of a value.
    """

    key_dim: int = 128
    value_dim: int = 128

    @property
    def rotated(self) -> int:
        return self.head_dim - self.latent

    def num_bytes(self, dtype: Any) -> int:
        """Stored vectors of the visible slots, projections, queries and output."""
        queries = len(self.context_lens) * self.num_tokens * self.num_heads
        numbers = (
            self.visible_slots * self.head_dim
            + self.num_heads * self.latent * (self.key_dim + self.value_dim)
            + queries * (self.key_dim + self.rotated + self.value_dim)
        )
        return numbers * jnp.dtype(dtype).itemsize

    @property
    def flops(self) -> int:
        """FLOPs of keys, values, scores and weighted sums, as if each query saw all slots of its
        sequence."""
        up = self.latent * (self.key_dim + self.value_dim)
        attended = self.num_tokens * (self.key_dim + self.rotated + self.value_dim)
        return 2 * self.num_heads * self.visible_slots * (up + attended)


# DeepSeek-V3's sizes on one GPU and on eight: the chunks that are expanded there, and a narrow one.
BENCHMARK_CASES = tuple(
    ExpandedCase(
        f"{num_tokens} tokens after {context}k, {num_heads} heads",
        (1024 * context,),
        num_tokens,
        num_heads,
        1,
        576,
        64,
    )
    for num_heads in (128, 16)
    for num_tokens, context in ((64, 8), (512, 0), (512, 8), (2048, 0))
)


def make_arguments(case: ExpandedCase, dtype: Any = jnp.float32, seed: int = 0) -> Arguments:
    """Positional arguments of expanded_attention. Every slot holds noise, unseen ones too."""
    _, pages, context = paged_attention.make_arguments(case, dtype, seed)
    queries = (len(case.context_lens), case.num_tokens, case.num_heads, case.key_dim + case.rotated)
    key_up, value_up = (
        noise(seed, 4 + i, (case.num_heads, size, case.latent), dtype) * case.latent**-0.5
        for i, size in enumerate((case.key_dim, case.value_dim))
    )
    q = noise(seed, 3, queries, dtype)
    return q, pages.k, key_up, value_up, context._replace(ancestors=None)


def absorbed(attend: Callable[..., Array], case: ExpandedCase) -> Callable[..., Array]:
    """The same function by ``attend``, of queries that are projected to the latent's space."""

    def call(
        q: Array, pages: Array, key_up: Array, value_up: Array, context: QueryContext
    ) -> Array:
        plain, rotated = jnp.split(q, [case.key_dim], axis=-1)
        plain = einsum_f32("btqd,qdl->btql", plain, key_up).astype(q.dtype)
        queries = jnp.concatenate([plain, rotated], axis=-1)
        attended = attend(queries, pages, context, **case.options)
        return einsum_f32("btql,qvl->btqv", attended, value_up).astype(q.dtype)

    return call


def benchmarks(dtype: Any = jnp.bfloat16) -> tuple[Benchmark, ...]:
    """The benchmark cases as calls to be timed."""
    return tuple(
        benchmark
        for case in BENCHMARK_CASES
        for benchmark in (as_benchmark(case, dtype), as_absorbed_benchmark(case, dtype))
    )


def as_benchmark(case: ExpandedCase, dtype: Any) -> Benchmark:
    """Beside the absorbed form, both in jnp: there is no kernel of the expanded one."""
    call = functools.partial(expanded_attention, scale=SCALE, first_slot=case.first_slot)
    return _benchmark(case, dtype, case.name, call, "reference")


def as_absorbed_benchmark(case: ExpandedCase, dtype: Any) -> Benchmark:
    """The absorbed form with the kernel of latent attention, where there is one. Its bytes and
    FLOPs are counted as those of the expanded form, so that the two compare."""
    implementation = implementation_to_time()
    attend = functools.partial(latent_attention, implementation=implementation)
    return _benchmark(case, dtype, f"{case.name}, absorbed", absorbed(attend, case), implementation)


def _benchmark(
    case: ExpandedCase,
    dtype: Any,
    name: str,
    call: Callable[..., Array],
    implementation: Implementation,
) -> Benchmark:
    return Benchmark(
        name=name,
        make_arguments=functools.partial(make_arguments, case, dtype),
        call=call,
        reference=absorbed(latent_attention_reference, case),
        feed=feed_lengths,
        num_bytes=case.num_bytes(dtype),
        flops=case.flops,
        implementation=implementation,
    )
