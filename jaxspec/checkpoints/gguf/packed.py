"""Weights of a GGUF file that stay packed in memory, as the tensors of checkpoints.formats.

These are the weights of the type Q4_0 in a bfloat16 model: integers of 4 bits and a scale for each
32 inputs, which a kernel multiplies as they are. docs/models.md says why other types are widened.
"""

from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.formats.views import Bounds, View
from jaxspec.checkpoints.gguf.tensors import WidenedTensor
from jaxspec.models.tensors import CheckpointTensor

PACKED = "Q4_0"
_GROUP, _SCALE_BYTES, _MIDDLE = 32, 2, 8
# Projections that are computed together must have one format.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def with_packed(
    stored: Mapping[str, CheckpointTensor], dtype: jnp.dtype
) -> dict[str, CheckpointTensor]:
    """The tensors for a model of ``dtype``, with values and scales in place of weights that stay
    packed. Tensors of other files than GGUF are unchanged."""
    tensors = dict(stored)
    if dtype != jnp.bfloat16:
        return tensors
    for module, weight in _packable(stored):
        del tensors[f"{module}.weight"]
        tensors[f"{module}.values"] = _values(weight)
        tensors[f"{module}.scale"] = _scales(weight)
    return tensors


def _packable(stored: Mapping[str, CheckpointTensor]) -> Iterator[tuple[str, WidenedTensor]]:
    """Modules whose weights, and those of projections that are computed with them, are of the type.

    Experts are left out: their products take no packed weights.
    """
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        parent, projection = _split(module)
        is_linear = projection.endswith("_proj") or module == "lm_head"
        if kind != "weight" or not is_linear or ".experts." in module:
            continue
        together = next((names for names in _TOGETHER if projection in names), (projection,))
        weights = [stored.get(f"{parent}{other}.weight") for other in together]
        if isinstance(tensor, WidenedTensor) and all(map(_is_packed, weights)):
            yield module, tensor


def _split(module: str) -> tuple[str, str]:
    """The name of a module as what it stands in, with its dot, and its own name."""
    parent, dot, projection = module.rpartition(".")
    return parent + dot, projection


def _is_packed(tensor: CheckpointTensor | None) -> bool:
    return isinstance(tensor, WidenedTensor) and tensor.kind == PACKED


def _values(weight: WidenedTensor) -> View:
    """Integers from -8 to 7, [out, in]. Low halves of a block's bytes are its first 16 inputs."""

    def compute(rows: Bounds, columns: Bounds) -> np.ndarray:
        pairs = _blocks(weight, rows)[..., _SCALE_BYTES:]  # [rows, groups, 16]
        halves = np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.int8) - _MIDDLE
        return halves.reshape(len(halves), -1)[:, slice(*columns)]

    return View(weight, weight.shape, "I4", compute)


def _scales(weight: WidenedTensor) -> View:
    """Scales [out, in / 32]. They may be negative or 0."""

    def compute(rows: Bounds, columns: Bounds) -> np.ndarray:
        halves = np.ascontiguousarray(_blocks(weight, rows)[..., :_SCALE_BYTES])
        return halves.view("<f2")[..., 0][:, slice(*columns)]

    outputs, inputs = weight.shape
    return View(weight, (outputs, inputs // _GROUP), "F16", compute)


def _blocks(weight: WidenedTensor, rows: Bounds) -> np.ndarray:
    """The bytes of these outputs: [rows, groups, bytes of a block]."""
    read = weight.stored_bytes(slice(*rows))
    return read.reshape(len(read), weight.shape[1] // _GROUP, -1)
