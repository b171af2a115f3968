"""The interface of ``cases.py`` to benchmarks: calls with a known number of bytes and FLOPs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.float8 import LARGEST, encode
from pallas_kernels.selection import Implementation, is_hopper

Arguments = tuple[Any, ...]  # arrays, and pytrees of them
LARGEST_NORMAL = 4.0  # about; a few normal numbers are larger
LARGEST_OF_NUMPY = 2**24  # numbers of an array


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One call of an operation.

    Attributes:
      make_arguments: makes random positional arguments from a seed, on the device.
      call: the public function; returns an array or a tuple of arrays.
      reference: the same function in jnp.
      feed: (arguments, output of the previous call) -> arguments of the next call. It makes each
        call depend on the previous one, so that none of a chain can be left out.
      num_bytes: bytes that any implementation must read and write.
      flops: floating-point operations that any implementation must do.
      implementation: the implementation that ``call`` runs.
      rotates: whether the calls of a chain rotate through several sets of arguments, so that none
        is found in the GPU's cache. False: each call reads what the previous one left there.
      seconds, reference_seconds: about how long a call takes at least, where that is far more than
        its bytes and FLOPs do. It decides only how many calls are timed.
    """

    name: str
    make_arguments: Callable[[int], Arguments]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    feed: Callable[[Arguments, Any], Arguments]
    num_bytes: int
    flops: int
    implementation: Implementation
    rotates: bool = True
    seconds: float = 0.0
    reference_seconds: float = 0.0


def implementation_to_time() -> Implementation:
    """The kernel on a Hopper GPU, the reference elsewhere."""
    return "mosaic_gpu" if is_hopper(jax.devices()[0]) else "reference"


def beside_reference(
    case: Any,
    make_arguments: Callable[[int], Arguments],
    function: Callable[..., Any],
    feed: Callable[[Arguments, Any], Arguments],
    flops: int,
    *,
    rotates: bool = True,
) -> Benchmark:
    """A case of an operation, whose ``function`` takes an ``implementation``: its kernel, beside
    its reference. ``case`` has a name and ``num_bytes``."""
    implementation = implementation_to_time()
    return Benchmark(
        name=str(case),
        make_arguments=make_arguments,
        call=functools.partial(function, implementation=implementation),
        reference=functools.partial(function, implementation="reference"),
        feed=feed,
        num_bytes=case.num_bytes,
        flops=flops,
        implementation=implementation,
        rotates=rotates,
    )


def noise(seed: int, index: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Standard normal numbers on the device; ``index`` is of the arrays of one seed.

    A CPU takes NumPy's: XLA would compile its generator for half a second for every shape. The
    largest arrays come from XLA: tests only trace them, and NumPy would take seconds to draw them.
    """
    if jax.default_backend() == "cpu" and math.prod(shape) <= LARGEST_OF_NUMPY:
        numbers = np.random.default_rng([seed, index]).standard_normal(shape, np.float32)
        return jax.device_put(numbers.astype(jnp.dtype(dtype)))
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
    return jax.random.normal(key, shape, dtype)


def float8_noise(seed: int, index: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Pages [P, G, K, D] of bytes and their scales [G], all different: normal numbers, as float8.py
    has them."""
    scale = jnp.linspace(1.0, 1.5, shape[1]) * LARGEST_NORMAL / LARGEST
    return _encoded(noise(seed, index, shape), scale), scale


@jax.jit  # not a program for each of its operations
def _encoded(pages: Array, scale: Array) -> Array:
    return encode(pages.swapaxes(1, 2), scale).swapaxes(1, 2)  # heads where ``encode`` has them
