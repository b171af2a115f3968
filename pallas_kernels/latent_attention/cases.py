"""Shapes of latent attention that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.paged_attention.cases import Case

SCALE = 192**-0.5  # DeepSeek-V3's heads have 128 entries and 64 that are rotated


@dataclasses.dataclass(frozen=True)
class LatentCase(Case):
    """One call: as one of paged attention, with one KV head of ``head_dim`` stored entries.

    Attributes:
      latent: the leading entries that are the value.
    """

    latent: int = 512

    @property
    def options(self) -> dict[str, Any]:
        return {"latent": self.latent, "scale": SCALE, "first_slot": self.first_slot}

    @property
    def num_bytes(self) -> int:
        """In bfloat16: stored vectors of the visible slots, queries and output."""
        queries = len(self.context_lens) * self.num_tokens * self.num_heads
        return 2 * (self.visible_slots * self.head_dim + queries * (self.head_dim + self.latent))

    @property
    def flops(self) -> int:
        """FLOPs of scores and weighted sums, as if each query saw all slots of its sequence."""
        pairs = self.num_tokens * self.num_heads * self.visible_slots
        return 2 * pairs * (self.head_dim + self.latent)


def _case(
    name: str,
    context_lens: tuple[int, ...],
    num_tokens: int,
    num_heads: int,
    page_size: int,
    stored: int = 192,
    latent: int = 128,
    **more: Any,
) -> LatentCase:
    return LatentCase(
        name, context_lens, num_tokens, num_heads, 1, stored, page_size, latent=latent, **more
    )


# All that the kernel distinguishes, narrow enough to be interpreted.
KERNEL_CASES = (
    _case("one query", (70, 130), 1, 16, 64),
    _case("one node of a tree", (70, 0, 130), 1, 64, 16, tree=True),
    _case("contexts around a page", (0, 1, 63, 64, 65), 1, 8, 64),
    _case("a tree", (70, 130), 6, 16, 16, tree=True),
    _case("a head of two tiles", (70, 130), 2, 128, 64, tree=True),
    _case("rows that end inside a tile", (10, 200), 5, 24, 128, tree=True),
    _case("a tree of two words", (50, 1), 40, 8, 8, tree=True),
    _case("a padded tree", (70, 0), 6, 16, 16, tree=True, real_tokens=4),
    _case("first slot", (70, 3), 6, 16, 32, tree=True, first_slot=1),
    _case("first slot in the third block", (150, 20), 3, 8, 64, first_slot=140),
    _case("a chunk", (10, 200), 20, 16, 64),
    _case("a padded chunk", (10, 125), 30, 8, 16, real_tokens=3),
)

# DeepSeek's sizes, long enough to reuse each stage of the ring many times. Some parts of contexts
# have no work.
LONG_CASES = (
    _case("L: one query", (3000, 5, 1025), 1, 128, 64, 576, 512),
    _case("L: few heads", (3000, 5, 1025), 1, 16, 16, 576, 512, tree=True),
    _case("L: a chain", (3000, 5, 1025), 6, 16, 64, 576, 512, tree=True),
    _case("L: a tree", (3000, 5, 1025), 16, 128, 64, 576, 512, tree=True),
    _case("L: many sequences", (3000, 5, 1025) * 20, 2, 64, 64, 576, 512, tree=True),
    _case("L: first slot", (3000, 5, 1025), 6, 32, 128, 576, 512, tree=True, first_slot=1),
    _case("L: a chunk", (2000, 0, 77), 100, 16, 64, 576, 512),
)

# 128 heads: DeepSeek-V3 on one GPU. 16: on eight, or DeepSeek-V2-Lite. Several queries form a tree.
BENCHMARK_CASES = tuple(
    _case(
        f"{batch} x {context}k, {num_tokens} queries, {num_heads} heads",
        (1024 * context,) * batch,
        num_tokens,
        num_heads,
        64,
        576,
        512,
        tree=num_tokens > 1,
    )
    for num_heads in (128, 16)
    for num_tokens in (1, 8, 16)
    for batch in (1, 8, 32)
    for context in (1, 8)
)

# Of those, and of LONG_CASES: with and without parts of contexts, masks and several copies a block.
COMPILED_CASES = (*LONG_CASES, *BENCHMARK_CASES[::7])


def make_arguments(case: LatentCase, dtype: Any = jnp.float32, seed: int = 0) -> Arguments:
    """Positional arguments of latent_attention. Every slot holds noise, unseen ones too."""
    return of_latents(paged_attention.make_arguments(case, dtype, seed))


def of_latents(arguments: Any) -> Arguments:
    """Arguments of paged_attention as latent_attention takes them."""
    q, pages, context = arguments
    return q, pages.k, context


def poisoned(case: LatentCase, poison: float, dtype: Any = jnp.bfloat16) -> Arguments:
    """The same arguments, with ``poison`` in all slots that no query sees."""
    arguments = paged_attention.make_arguments(case, dtype)
    return of_latents(paged_attention.poisoned(case, arguments, poison))


def benchmarks() -> list[Benchmark]:
    """The benchmark cases as calls to be timed."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(latent_attention, **case.options),
            _feed_lengths,
            flops=case.flops,
        )
        for case in BENCHMARK_CASES
    ]


def _feed_lengths(arguments: Arguments, output: Array) -> Arguments:
    """The next call's queries are there only after the output, of which its lengths take nothing.

    (To write outputs, which are narrower than queries, into them would take a copy.)
    """
    q, *others, context = arguments
    q, output = lax.optimization_barrier((q, output))
    kv_lens = context.kv_lens + (0 * output[0, 0, 0, 0]).astype(context.kv_lens.dtype)
    return q, *others, context._replace(kv_lens=kv_lens)
