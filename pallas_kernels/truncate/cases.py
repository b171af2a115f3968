"""Shapes and parameters of truncate that tests and benchmarks share, and arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Benchmark, beside_reference, noise
from pallas_kernels.selection import Implementation
from pallas_kernels.truncate import truncation_threshold


@dataclasses.dataclass(frozen=True)
class Rule:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """``nodes`` rows of ``size`` logits for each of ``rules``.

    Attributes:
      ties: round logits to quarters, so that many are equal.
      padding: number of -inf entries at the end of a row.
    """

    name: str
    size: int
    rules: tuple[Rule, ...]
    nodes: int = 2
    ties: bool = False
    padding: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def num_read(self) -> int:
        """Logits that are read."""
        return sum(rule != KEEP_ALL for rule in self.rules) * self.nodes * self.size

    @property
    def num_bytes(self) -> int:
        return 4 * (self.num_read + len(self.rules) * self.nodes)


KEEP_ALL = Rule(0.7)
MIXED = (
    Rule(0.8, 50, 0.9, 0.02),
    KEEP_ALL,
    Rule(0.5, top_k=7),
    Rule(2.0, top_p=0.95),
    Rule(1.0, min_p=0.1),
)
EXTREME = (
    Rule(top_k=1),
    Rule(top_p=1e-6),
    Rule(top_p=0.998),
    Rule(top_k=700, top_p=0.5),
    Rule(min_p=1.0),
    Rule(top_k=10**9),
    Rule(top_k=1000, min_p=1e-6),
)
SMALL_CASES = (  # most have the same shape, so one program serves them
    Case("random, 1024", 1024, MIXED + EXTREME, nodes=1),
    Case("ties, 1024", 1024, MIXED + EXTREME, nodes=1, ties=True),
    Case("padding, 1024", 1024, MIXED + EXTREME, nodes=1, padding=77),
    Case("one chunk", 128, MIXED),
)
LARGE_CASES = (
    Case("mixed, 32000", 32_000, MIXED),
    Case("ties, 32000", 32_000, MIXED + EXTREME, ties=True, padding=5),
    Case("mixed, 128256", 128_256, MIXED),
    Case("extreme, 128256", 128_256, EXTREME, padding=1000),
    Case("mixed, 151936", 151_936, MIXED),
    Case("mixed, 262144", 262_144, MIXED + EXTREME),
)
TEST_CASES = SMALL_CASES + LARGE_CASES
# A drafting step, and the verification of 6 tokens, of 1 and of 8 sequences.
BENCHMARK_CASES = tuple(
    Case(f"{name}, {rows} x {nodes} x {size}", size, (rule,) * rows, nodes)
    for nodes, size in ((1, 32_000), (6, 128_256))
    for rows in (1, 8)
    for name, rule in (
        ("nothing", KEEP_ALL),
        ("top-k", Rule(0.8, top_k=50)),
        ("top-p", Rule(0.8, top_p=0.9)),
        ("all", Rule(0.8, 50, 0.9, 0.02)),
    )
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Array, ...]:
    """Positional arguments of truncation_threshold."""
    shape = (len(case.rules), case.nodes, case.size)
    logits = 3 * noise(seed, 0, shape)
    if case.ties:
        logits = jnp.round(4 * logits) / 4
    logits = jnp.where(jnp.arange(case.size) < case.size - case.padding, logits, -jnp.inf)
    parameters = (
        jnp.array([getattr(rule, field.name) for rule in case.rules])
        for field in dataclasses.fields(Rule)
    )
    return logits, *parameters


def benchmarks() -> Sequence[Benchmark]:
    return [_benchmark(case) for case in BENCHMARK_CASES]


def _benchmark(case: Case) -> Benchmark:
    def call(
        logits: Array, *parameters: Array, implementation: Implementation
    ) -> tuple[Array, Array]:
        """The thresholds, and the logits for the next call: the same array, updated in place.

        It stays in the GPU's cache, as it does in the engine after the LM head's product.
        """
        threshold = truncation_threshold(logits, *parameters, implementation=implementation)
        threshold = jnp.where(jnp.isfinite(threshold), threshold, 0.0)  # errors are differences
        return threshold, logits.at[0, 0, 0].set(threshold[0, 0])

    return beside_reference(
        case,
        functools.partial(make_arguments, case),
        call,
        lambda arguments, output: (output[-1], *arguments[1:]),
        flops=2 * case.num_read,
        rotates=False,
    )
