"""What every operation's ``cases.py`` offers for timing: calls whose cost is known."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

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
    """

    name: str
    make_arguments: Callable[[int], Arguments]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    feed: Callable[[Arguments, Any], Arguments]
    num_bytes: int
    flops: int
