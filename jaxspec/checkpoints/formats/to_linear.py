"""The kind of Linear that each projection of a checkpoint becomes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.dtypes import DTYPES
from jaxspec.checkpoints.formats.to_experts import experts_shape
from jaxspec.checkpoints.formats.views import in_file
from jaxspec.models.linear import AnyLinear, Linear
from jaxspec.models.mlps.expert_linear import AnyExpertLinear, ExpertLinear
from jaxspec.models.quantized.float4 import float4_shape
from jaxspec.models.quantized.float8 import E4M3, float8_shape
from jaxspec.models.quantized.grouped import grouped_shape
from jaxspec.models.tensors import CheckpointTensor, Source
from jaxspec.models.wrapped_tensors import multiplies
from jaxspec.parallel import Shards

VALUES = ("values", "pairs", "codes")


def as_stored(
    stored: Mapping[str, CheckpointTensor], shards: Shards
) -> Callable[[Any, Source], AnyLinear | AnyExpertLinear]:
    """Chooses the weight format of a projection, or of experts, by the tensors of a checkpoint (see
    formats).

    The result raises ValueError if the projections of one Linear are stored in several formats, or
    if ``shards`` would cut a group of inputs.
    """

    def kind(linear: Any, source: Source) -> AnyLinear | AnyExpertLinear:
        found = [n for n in source.names if any(f"{n}.{part}" in stored for part in VALUES)]
        if not found or _must_be_widened(stored, source, linear):
            return linear
        plain = [name for name in source.names if name not in found and f"{name}.weight" in stored]
        if plain:
            raise ValueError(
                f"{in_file(stored, found[0])} is quantized and {in_file(stored, plain[0])} is not: "
                "projections that are computed together must have one format"
            )
        _check_alike(stored, found)  # those that are missing are named where all are read
        if isinstance(linear, ExpertLinear):
            return experts_shape(stored, found[0], linear)
        return _shapes(stored, found[0], linear, shards)

    return kind


def _shapes(
    stored: Mapping[str, CheckpointTensor], name: str, linear: Linear, shards: Shards
) -> AnyLinear:
    """A quantized Linear of ShapeDtypeStructs, in the format of the module ``name``."""
    scale = stored[f"{name}.scale"]
    num_groups = scale.shape[1]
    mixed = f"{name}.groups" in stored
    parts = shards.of(linear.axes[0])
    whole = num_groups == 1 or mixed
    if not whole and num_groups % parts:
        raise ValueError(
            f"the {num_groups} groups of inputs of {name} cannot be split over {parts} devices"
        )
    if whole and shards.layout.hidden:
        raise ValueError(
            f"{name} has one scale for all inputs, or groups in mixed order: it cannot be split "
            "over a grid of devices; take a number of devices, no grid"
        )

    scale_dtype = DTYPES[scale.dtype]
    if f"{name}.codes" in stored:
        return float4_shape(linear, num_groups, scale_dtype, factor=f"{name}.factor" in stored)
    dtype = DTYPES[stored[f"{name}.values"].dtype]
    if dtype == E4M3:
        is_static = f"{name}.inputs" in stored
        return float8_shape(linear, num_groups, scale_dtype, is_static=is_static)
    zero, rounds = (f"{name}.{kind}" in stored for kind in ("zero", "rounds"))
    return grouped_shape(
        linear, num_groups, dtype, scale_dtype, zero=zero, mixed=mixed, rounds=rounds
    )


def _must_be_widened(stored: Mapping[str, CheckpointTensor], source: Source, linear: Any) -> bool:
    """Whether a Linear has 4-bit floats that cannot stay so (see widened.py): beside weights that
    are not quantized or other such floats, or times a number of the config."""
    if isinstance(linear, ExpertLinear):
        return False
    if any(f"{name}.values" in stored for name in source.names):
        return False
    scales = {_signature(stored.get(f"{name}.scale"), "scale") for name in source.names}
    has_codes = any(f"{name}.codes" in stored for name in source.names)
    return has_codes and (len(scales) > 1 or multiplies(source))


def _check_alike(stored: Mapping[str, CheckpointTensor], names: Sequence[str]) -> None:
    """Raise ValueError unless these modules are quantized alike."""
    first, *others = names
    for other in others:
        for kind in (*VALUES, "scale", "blocks", "zero", "factor", "groups", "rounds", "inputs"):
            ours, theirs = (stored.get(f"{name}.{kind}") for name in (first, other))
            if _signature(ours, kind) != _signature(theirs, kind):
                pair = f"{in_file(stored, first)} and {in_file(stored, other)}"
                raise ValueError(
                    f"{pair} are quantized differently ({kind}): projections that are computed "
                    "together must have one format"
                )


def _signature(tensor: CheckpointTensor | None, kind: str) -> Any:
    """What must be the same of a tensor of two modules: inputs, dtype, and which groups."""
    if tensor is None:
        return None
    if kind == "groups":
        return np.asarray(tensor.read()).tobytes()
    return tensor.dtype, tensor.shape[1:]
