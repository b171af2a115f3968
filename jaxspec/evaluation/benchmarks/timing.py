"""Wall-clock timing of device work, and measurements of the device's peak rates."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def timed[T](call: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """The result of a call once it is ready, and the seconds it took."""
    started = time.perf_counter()
    result = jax.block_until_ready(call(*arguments))
    return result, time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth of one device, in bytes per second."""

    copy: float  # x + 1 in place: bytes read and written
    read: float  # a sum: bytes read

    @property
    def best(self) -> float:
        return max(self.copy, self.read)


def measure_bandwidth(num_bytes: int, passes: int = 20, repeats: int = 5) -> Bandwidth:
    """Stream ``num_bytes`` of random data ``passes`` times per call.

    ``num_bytes`` should exceed every cache. Each pass depends on the one before, so that none can
    be left out.
    """
    bits = jax.random.bits(jax.random.key(0, impl="rbg"), (num_bytes // 4,), jnp.uint32)
    increment = jax.jit(_increment, static_argnums=1, donate_argnums=0)
    total = jax.jit(_total, static_argnums=1)
    jax.block_until_ready(total(bits, passes))
    reads = [timed(total, bits, passes)[1] for _ in range(repeats)]
    bits = jax.block_until_ready(increment(bits, passes))
    copies = []
    for _ in range(repeats):
        bits, seconds = timed(increment, bits, passes)
        copies.append(seconds)
    moved = bits.nbytes * passes
    return Bandwidth(
        copy=2 * moved / statistics.median(copies), read=moved / statistics.median(reads)
    )


def _increment(x: Array, passes: int) -> Array:
    return lax.fori_loop(0, passes, lambda _, x: x + 1, x)


def _total(x: Array, passes: int) -> Array:
    return lax.fori_loop(0, passes, lambda _, seed: jnp.sum(x ^ seed), jnp.uint32(0))


def measure_product_rate(size: int, passes: int = 20, repeats: int = 5) -> float:
    """FLOP/s of one device in a chain of bfloat16 products of ``size`` x ``size`` matrices."""
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16) * size**-0.5
        for key in jax.random.split(jax.random.key(0, impl="rbg"))
    )  # scaled so that values stay of the same magnitude
    multiply = jax.jit(_multiply, static_argnums=2)
    jax.block_until_ready(multiply(left, right, passes))
    seconds = [timed(multiply, left, right, passes)[1] for _ in range(repeats)]
    return 2 * size**3 * passes / statistics.median(seconds)


def _multiply(left: Array, right: Array, passes: int) -> Array:
    return lax.fori_loop(0, passes, lambda _, x: x @ right, left)
