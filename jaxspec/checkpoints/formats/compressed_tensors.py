"""compressed-tensors: packed integers, and floats of 8 or 4 bits.

Packed integers (``pack-quantized``): ``weight_packed`` int32 [out, in * bits / 32],
``weight_scale`` [out, groups], ``weight_shape`` int64 [2], and where they are not symmetric
``weight_zero_point`` int32 [out * bits / 32, groups], packed along the outputs; ``weight_g_idx``
int32 [in] for mixed groups. Integers are signed, and packed plus 2^(bits - 1);
w = (q - zero) * scale. Activations have 16 bits; or symmetric weights of 4 bits have activations
that are rounded to e4m3 when they are used, with a scale for each token (W4AFP8).

Floats (``float-quantized``): ``weight`` e4m3 [out, in] and ``weight_scale`` [out, 1], or one for a
module, or [out / 128, in / 128]; activations are rounded when they are used, with a scale for each
token, or with ``input_scale``, one for a module. ``mxfp8-quantized``: ``weight_scale`` U8 [out,
in / 32], exponents.

Floats of 4 bits: ``weight_packed`` U8 [out, in / 2], and ``weight_scale`` U8 [out, in / 32]
(``mxfp4-pack-quantized``), or e4m3 [out, in / 16], which is divided by ``weight_global_scale``
(``nvfp4-pack-quantized``). Activations stay as they are, whatever the config rounds them to.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.eight_bits import BLOCK, GROUP, float8_module
from jaxspec.checkpoints.formats.fields import Fields
from jaxspec.checkpoints.formats.four_bits import E4M3, factor_of, float4_module
from jaxspec.checkpoints.formats.gptq import mixed_groups
from jaxspec.checkpoints.formats.packing import per_word
from jaxspec.checkpoints.formats.plain import check_plain
from jaxspec.checkpoints.formats.views import (
    Tensors,
    check_divides,
    check_shape,
    check_words,
    checked_scales,
    marker,
    modules_in_files,
    packed_integers,
    part_of,
    with_modules,
    zeros_like_scales,
)
from jaxspec.models.json.values import shown
from jaxspec.models.tensors import CheckpointTensor

FORMATS = (
    *("pack-quantized", "float-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"),
)
PARTS = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "input_global_scale"),
)
FLOAT8 = ("weight", "weight_scale", "input_scale")
# By whether weights are floats, and their bits.
STRATEGIES = MappingProxyType(
    {
        (False, 4): ("channel", "group"),
        (False, 8): ("channel", "group"),
        (True, 8): ("channel", "tensor", "block", "group"),
        (True, 4): ("group", "tensor_group"),
    }
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the modules of a config group are quantized.

    Attributes:
      targets: names of modules, ``re:`` and an expression, or the class ``Linear``.
      is_float: e4m3, or e2m1 if ``bits`` are 4; else integers of ``bits``.
      group: inputs that share a scale; None: all of them.
      block: [rows, columns] that share a scale; None: groups.
      rounds: whether activations are rounded to e4m3 when they are used; with e4m3 they always are.
      is_static: whether that is with scales of the file.
    """

    targets: tuple[str, ...]
    is_float: bool
    bits: int
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    rounds: bool
    is_static: bool

    @property
    def kind(self) -> str:
        return f"{self.bits}-bit floats" if self.is_float else "packed integers"

    def fits(self, module: str, in_file: str) -> bool:
        """Whether a target means a module, by the name of the layers or of the file."""
        names = module, in_file
        return any(_matches(target, name) for target in self.targets for name in names)


def read_compressed_tensors(
    config: Mapping[str, Any], stored: Tensors
) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of quantized modules as the package's.

    Raises ValueError that names the field or the tensor that is not supported or does not fit.
    """
    schemes, in_files = read_schemes(config), modules_in_files(stored)

    def fitting(module: str) -> list[Scheme]:
        return [scheme for scheme in schemes if scheme.fits(module, in_files.get(module, module))]

    def packed(module: str) -> dict[str, CheckpointTensor]:
        _check_not_of_all(part_of(stored, module, PARTS[0]))
        if part_of(stored, module, PARTS[0]).dtype == "U8":
            _scheme_of(fitting(module), module, "4-bit floats")
            return _float4(stored, module)
        return _packed(stored, module, _scheme_of(fitting(module), module, "packed integers"))

    def floats(module: str) -> dict[str, CheckpointTensor]:
        if f"{module}.{FLOAT8[0]}" not in stored and _has_packed_only(fitting(module)):
            part_of(stored, module, PARTS[0])
        scheme = _scheme_of(fitting(module), module, "8-bit floats")
        inputs = FLOAT8[-1] if scheme.is_static else None
        if inputs is None and f"{module}.{FLOAT8[-1]}" in stored:
            raise ValueError(
                f"{module}.{FLOAT8[-1]} is there, but input_activations are dynamic in "
                "quantization_config"
            )
        return float8_module(stored, module, FLOAT8[1], scheme.block, inputs)

    tensors = with_modules(stored, PARTS[0], PARTS, packed, ("weight_shape", "weight_global_scale"))
    tensors = with_modules(tensors, FLOAT8[1], FLOAT8, floats)
    check_plain(config, ("ignore",), stored, tensors, lambda module: bool(fitting(module)))
    return tensors


def read_schemes(config: Mapping[str, Any]) -> list[Scheme]:
    """The config groups. Raises ValueError that names a field that is not supported."""
    fields = Fields("quantization_config", config)
    whole_format = fields.must_be("format", *FORMATS, default="pack-quantized")
    fields.must_be("quantization_status", "compressed", "frozen", default="compressed")
    if fields.get("kv_cache_scheme") is not None:
        raise ValueError(
            "quantization_config: kv_cache_scheme is not supported: set it to null, and choose the "
            "KV cache's dtype with an option"
        )
    if fields.get("sparsity_config", default={}):
        raise ValueError("quantization_config: sparsity_config is not supported")
    if fields.get("transform_config", default={}):
        raise ValueError("quantization_config: transform_config (rotations) is not supported")
    groups = fields.get("config_groups")
    fields.ignored("quant_method", "ignore", "global_compression_ratio", "version")
    fields.check_all_read()
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) for group in groups.values()
    ):
        raise ValueError(
            f"quantization_config: config_groups must be an object of objects, got {shown(groups)}"
        )
    return [
        _read_scheme(f"quantization_config: config_groups.{name}", group, whole_format)
        for name, group in groups.items()
    ]


def _read_scheme(where: str, group: Mapping[str, Any], whole_format: str) -> Scheme:
    fields = Fields(where, group)
    targets, weights = fields.get("targets", default=["Linear"]), fields.get("weights")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{where}: targets must be a list of names, got {shown(targets)}")
    if not isinstance(weights, dict):
        raise ValueError(f"{where}: weights must be an object, got {shown(weights)}")
    if fields.get("output_activations") is not None:
        raise ValueError(f"{where}: output_activations is not supported")
    fields.must_be("format", *FORMATS, default=whole_format)
    inputs = fields.get("input_activations")
    fields.check_all_read()
    fields = Fields(f"{where}.weights", weights)
    is_float = fields.must_be("type", "int", "float", default="int") == "float"
    bits = fields.must_be("num_bits", 4, 8)
    fields.must_be("dynamic", False, default=False)
    strategy = fields.must_be("strategy", *STRATEGIES[is_float, bits])
    block = _block_of(fields, strategy) if is_float and bits == 8 else None
    scheme = Scheme(
        targets=tuple(targets),
        is_float=is_float,
        bits=bits,
        symmetric=fields.must_be(
            "symmetric", *((True,) if is_float else (True, False)), default=True
        ),
        group=fields.group_size("group_size") if strategy == "group" else None,
        block=block,
        rounds=inputs is not None or (is_float and bits == 8),
        is_static=is_float and bits == 8 and _is_static(inputs),
    )
    fields.ignored("actorder", "observer", "observer_kwargs", "block_structure", "group_size")
    fields.ignored("scale_dtype", "zp_dtype")
    fields.check_all_read()
    _check_inputs(f"{where}.input_activations", inputs, scheme)
    return scheme


def _block_of(fields: Fields, strategy: str) -> tuple[int, int] | None:
    """Outputs and inputs of 8-bit floats that share a scale; see ``float8_module``."""
    if strategy == "group":
        fields.must_be("group_size", GROUP[1])
        return GROUP
    if strategy != "block":
        return None
    fields.must_be("block_structure", list(BLOCK), default=list(BLOCK))
    return BLOCK


def _is_static(inputs: Any) -> bool:
    return isinstance(inputs, dict) and inputs.get("dynamic") is False


def _check_inputs(where: str, inputs: Any, scheme: Scheme) -> None:
    """Raise ValueError unless activations are rounded as the scheme's weights need it."""
    if scheme.kind == "4-bit floats":
        return
    if not scheme.is_float:
        if inputs is None:
            return
        if scheme.bits != 4 or not scheme.symmetric:
            kind = "symmetric: false" if scheme.bits == 4 else f"{scheme.bits} bits"
            raise ValueError(
                f"{where} is not supported for integer weights with {kind}: only 16-bit "
                "activations (null)"
            )
    if not isinstance(inputs, dict):
        kind = "8-bit floats" if scheme.is_float else "integers with rounded activations"
        raise ValueError(f"{where} must be an object for weights of {kind}")
    fields = Fields(where, inputs)
    fields.must_be("type", "float")
    fields.must_be("num_bits", 8)
    fields.must_be("symmetric", True, default=True)
    if scheme.is_static and scheme.block is None:
        fields.must_be("dynamic", False)
        fields.must_be("strategy", "tensor")
    elif scheme.block is None:
        fields.must_be("dynamic", True)
        fields.must_be("strategy", "token")
    else:
        fields.must_be("dynamic", True)
        fields.must_be("strategy", "group", "block")
        fields.must_be("group_size", scheme.block[1], default=scheme.block[1])
    fields.ignored("observer", "observer_kwargs", "actorder", "group_size", "block_structure")
    fields.ignored("scale_dtype", "zp_dtype")
    fields.check_all_read()


def _packed(stored: Tensors, module: str, scheme: Scheme) -> dict[str, CheckpointTensor]:
    words, scales, shape = (part_of(stored, module, part) for part in PARTS[:3])
    sizes = [int(size) for size in shape.read()] if shape.shape == (2,) else []
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"{shape.name} must hold two sizes, got {shown(sizes)}")
    outputs, size = sizes
    groups = check_divides(module, size, scheme.group or size)
    count = per_word(scheme.bits)
    check_words(words, (outputs, -(-size // count)))
    check_shape(scales, (outputs, groups))
    tensors: dict[str, CheckpointTensor] = {
        f"{module}.values": packed_integers(words, scheme.bits, 1, inputs_first=False, size=size),
        f"{module}.scale": checked_scales(scales, inputs_first=False),
    }
    if scheme.symmetric:
        zeros = stored.get(f"{module}.weight_zero_point")
        _check_no_zeros(zeros, (outputs, groups), scheme.bits)
    else:
        zeros = part_of(stored, module, "weight_zero_point")
        check_words(zeros, (-(-outputs // count), groups))
        zeros_as_stored = packed_integers(zeros, scheme.bits, 0, inputs_first=False, size=outputs)
        tensors[f"{module}.zero"] = zeros_like_scales(zeros_as_stored, scales)
    if scheme.rounds:
        tensors[f"{module}.rounds"] = marker(words)
    mixed = mixed_groups(stored.get(f"{module}.weight_g_idx"), size, groups)
    return tensors if mixed is None else tensors | {f"{module}.groups": mixed}


def _check_not_of_all(packed: CheckpointTensor) -> None:
    """Raise ValueError for a tensor of all experts."""
    if len(packed.shape) == 3:
        raise ValueError(
            f"{packed.name} is {list(packed.shape)}, of all experts: tensors of each expert are "
            "read of compressed-tensors, and of all experts those of ModelOpt"
        )


def _check_no_zeros(zeros: CheckpointTensor | None, shape: tuple[int, int], bits: int) -> None:
    """Raise ValueError for zero points of a scheme that the config calls symmetric, unless all are
    the middle of the range, which some files store: packed plus 2^(bits - 1) as others are, as
    numbers plus that, or as zeros.

    ``shape``: outputs and groups.
    """
    if zeros is None or not np.any(zeros.read()):
        return
    outputs, groups = shape
    if zeros.dtype == "I32" and zeros.shape == (-(-outputs // per_word(bits)), groups):
        off = packed_integers(zeros, bits, 0, inputs_first=False, size=outputs).read()
    else:
        off = zeros.read().astype(np.int64) - 2 ** (bits - 1)
    if np.any(off):
        raise ValueError(
            f"{zeros.name} has zero points other than the middle, but quantization_config says "
            "symmetric: true"
        )


def _float4(stored: Tensors, module: str) -> dict[str, CheckpointTensor]:
    codes, scale = (part_of(stored, module, part) for part in PARTS[:2])
    factor = None
    if scale.dtype == E4M3:
        whole = part_of(stored, module, "weight_global_scale")
        factor = factor_of(whole, codes.shape[0], divides=True)
    return float4_module(module, codes, scale, factor)


def _has_packed_only(fitting: list[Scheme]) -> bool:
    kinds = {scheme.kind for scheme in fitting}
    return bool(kinds) and "8-bit floats" not in kinds


def _scheme_of(fitting: list[Scheme], module: str, kind: str) -> Scheme:
    for scheme in fitting:
        if scheme.kind == kind:
            return scheme
    raise ValueError(f"{module} holds {kind}, but no group of quantization_config says so")


def _matches(target: str, module: str) -> bool:
    """Whether a config group's target means a module, as compressed-tensors has it."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error:
            raise ValueError(
                f"quantization_config: target {shown(target)} is no regular expression"
            ) from None
    return target in ("Linear", module)
