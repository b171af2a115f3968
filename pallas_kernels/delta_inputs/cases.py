"""Shapes of delta_inputs that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import Benchmark, beside_reference, noise
from pallas_kernels.delta_inputs import ConvolvedNodes, Strengths, delta_inputs
from pallas_kernels.delta_rule import cases as delta_rule

KEY_DIM = 128
SMALL = 1e-12  # share of an output that the next projections get


@dataclasses.dataclass(frozen=True)
class Case(delta_rule.Case):
    """Trees and heads as of the delta rule; windows do not matter."""

    def __str__(self) -> str:
        return self.sizes

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: channels in bfloat16, inputs in float32."""
        nodes = self.batch * self.nodes * (6 * self.wide + 12 * self.values)
        return self.groups * (nodes + 2 * self.wide * (self.batch * (self.taps - 1) + self.taps))


TEST_CASES = (Case(2, 5), Case(1, 1, values=4, v_dim=64), Case(1, 2, taps=2), Case(3, 16, 1))
BENCHMARK_CASES = tuple(Case(batch, nodes, 16) for batch in (1, 8, 32) for nodes in (1, 4, 16))


def make_arguments(case: Case, seed: int = 0) -> tuple[ConvolvedNodes, Strengths]:
    """Positional arguments of delta_inputs, but for the size of keys."""
    rng, past, bf16 = np.random.default_rng(seed), case.taps - 1, jnp.bfloat16
    rows, shape = case.batch + 2, (case.batch, case.nodes, case.groups)
    trees = [_places(rng, case.nodes, past) for _ in range(case.batch)]
    nodes = ConvolvedNodes(
        qkvz=noise(seed, 0, (*shape, case.wide + case.values * case.v_dim), bf16),
        before=noise(seed, 1, (rows, past, case.groups, case.wide), bf16),
        rows=jnp.asarray(rng.permutation(rows)[: case.batch], jnp.int32),
        places=jnp.asarray(trees, jnp.int32),
        taps=noise(seed, 2, (case.taps, case.groups, case.wide), bf16),
    )
    weights = (noise(seed, part, (case.groups, case.values), jnp.float32) for part in (3, 4))
    return nodes, Strengths(noise(seed, 5, (*shape, 2 * case.values), bf16), *weights)


def _places(rng: np.random.Generator, nodes: int, past: int) -> np.ndarray:
    """The tokens before each node of a random tree, as in ConvolvedNodes."""
    places = [np.arange(past)]  # of the root: all are before the tree
    for node in range(1, nodes):
        parent = int(rng.integers(node))
        places.append(np.append(places[parent][1:], past + parent))
    return np.stack(places)


def benchmarks() -> Sequence[Benchmark]:
    """Queries of a call are added to the next call's projections, all but not at all."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case),
            functools.partial(delta_inputs, k_dim=KEY_DIM),
            _feed,
            flops=case.batch * case.nodes * case.groups * case.wide * 2 * case.taps,
        )
        for case in BENCHMARK_CASES
    ]


def _feed(arguments: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    nodes, strengths = arguments
    added = (SMALL * output[0]).astype(nodes.qkvz.dtype)
    qkvz = nodes.qkvz.at[..., :KEY_DIM].add(added)
    return nodes._replace(qkvz=qkvz), strengths
