"""The kind of expert weights that the quantized projections of a checkpoint's experts become."""

from collections.abc import Mapping

from jaxspec.checkpoints.formats.dtypes import DTYPES
from jaxspec.checkpoints.formats.eight_bits import BLOCK
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.quantized.float8_experts import Float8Experts, float8_experts_shape
from jaxspec.models.quantized.four_bit_experts import (
    KINDS,
    FourBitExperts,
    four_bit_experts_shape,
)
from jaxspec.models.tensors import CheckpointTensor
from pallas_kernels.four_bits import Code


def experts_shape(
    stored: Mapping[str, CheckpointTensor], name: str, linear: ExpertLinear
) -> FourBitExperts | Float8Experts:
    """Quantized experts of ShapeDtypeStructs, in the format of the module ``name``, which is that
    of all others.

    Raises ValueError for a format that experts are not read in.
    """
    if (blocks := stored.get(f"{name}.blocks")) is not None:
        block = _block(stored[f"{name}.values"].shape, blocks.shape)
        return float8_experts_shape(linear, block, DTYPES[_dtype_of(blocks)])
    codes: list[Code] = [code for code, kind in KINDS.items() if f"{name}.{kind}" in stored]
    if not codes:
        raise ValueError(
            f"{name} has weights of {stored[f'{name}.values'].dtype}, which are not read of "
            "experts: take a checkpoint in bfloat16, in 8-bit floats or in 4 bits"
        )
    for kind, problem in (("groups", "groups in mixed order"), ("rounds", "rounded activations")):
        if f"{name}.{kind}" in stored:
            raise ValueError(f"{name} has {problem}, which experts are not read with")
    scale = stored[f"{name}.scale"]
    has_zero, has_factor = (f"{name}.{kind}" in stored for kind in ("zero", "factor"))
    return four_bit_experts_shape(
        linear, codes[0], scale.shape[1], DTYPES[scale.dtype], zero=has_zero, factor=has_factor
    )


def _block(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Outputs and inputs that share one of so many scales, of so many values."""
    if scales == tuple(-(-size // step) for size, step in zip(values, BLOCK, strict=True)):
        return BLOCK
    rows, columns = (size // count for size, count in zip(values, scales, strict=True))
    return rows, columns


def _dtype_of(blocks: CheckpointTensor) -> str:
    """The dtype of scales in memory: bytes, which are exponents, or float32."""
    return "U8" if blocks.dtype == "U8" else "F32"
