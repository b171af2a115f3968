"""Names of the ways in which weights in memory can be rounded; see quantized.schemes and
quantized.packed_experts."""

from typing import Literal, get_args

Scheme = Literal["w4a16", "w4a16-zeros", "w4a8", "w8a16", "fp8", "fp8-block", "mxfp4", "nvfp4"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

ExpertFormat = Literal["fp8", "mxfp8", "mxfp4", "nvfp4", "int4", "int4-zeros"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)
