"""What every operation's ``cases.py`` offers for timing: calls whose cost is known."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from pallas_kernels.selection import Implementation, is_hopper

Arguments = tuple[Array | None, ...]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One call of an operation.

    Attributes:
      make_arguments: random positional arguments from a seed, made on the device.
      call: the public function; it returns an array or a tuple of them.
      reference: the same in jnp.
      feed: (arguments, output of the call before) -> arguments; a chain of calls fed so has to
        compute them all.
      num_bytes: what any implementation must read and write.
      flops: multiplications and additions that any implementation must do.
      implementation: what ``call`` runs.
      rotates: False where each call works on what the one before left, in the cache.
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


def implementation_to_time() -> Implementation:
    """The kernel wherever it can run."""
    return "mosaic_gpu" if is_hopper(jax.devices()[0]) else "reference"
