"""Names of the ways in which weights in memory can be rounded; see quantized.schemes."""

from typing import Literal, get_args

Scheme = Literal["w4a16", "w4a16-zeros", "w4a8", "w8a16", "fp8", "fp8-block"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
