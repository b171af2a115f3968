"""Tensors that hold a projection of all experts, read as if each expert had its own.

``<block>.experts.gate_up_proj`` (or ``gate_proj`` and ``up_proj``) and ``down_proj`` become
``<block>.experts.<i>.gate_proj.weight`` and so on, as most checkpoints have them. A router's
correction [1, E] becomes [E].
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.config.experts import ExpertsConfig, Fused
from jaxspec.config.mlps import experts_of
from jaxspec.config.model import ModelConfig
from jaxspec.models.tensors import CheckpointTensor

OF_ALL = r"(?P<experts>.*\.experts)\.(?P<kind>gate_up_proj|gate_proj|up_proj|down_proj)"
FUSED = re.compile(OF_ALL + "(?P<bias>_bias)?")
CORRECTION = ".e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class OfExpert:
    """One expert's projection [out, in], or its bias [out], inside of a tensor of all experts.

    Attributes:
      whole: [E, all, in], [E, in, all] or [E, all].
      step, first: of all outputs, every ``step``-th from ``first`` on is the projection's.
      size: number of its outputs.
      inputs_first: ``whole`` has the input before the outputs.
    """

    whole: CheckpointTensor
    expert: int
    first: int
    step: int
    size: int
    inputs_first: bool

    @property
    def file(self) -> Path:
        return self.whole.file

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{self.expert}]"

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.whole.shape) == 2:
            return (self.size,)
        return (self.size, self.whole.shape[1 if self.inputs_first else 2])

    def read(self, *index: slice) -> np.ndarray:
        rows, *columns = index or (slice(0, size) for size in self.shape)
        start, stop, _ = rows.indices(self.size)
        last = max(start, stop - 1)
        outputs = slice(self.first + start * self.step, self.first + last * self.step + 1)
        expert = slice(self.expert, self.expert + 1)
        if self.inputs_first and columns:
            block = self.whole.read(expert, *columns, outputs)[0].T
        else:
            block = self.whole.read(expert, outputs, *columns)[0]
        return block[:: self.step][: stop - start]


@dataclasses.dataclass(frozen=True)
class OneRow:
    """The row of a tensor [1, N], as a vector [N]."""

    whole: CheckpointTensor

    @property
    def file(self) -> Path:
        return self.whole.file

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[1:]

    def read(self, *index: slice) -> np.ndarray:
        return self.whole.read(slice(0, 1), *index)[0]


def unfused(
    stored: Mapping[str, CheckpointTensor], config: ModelConfig
) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of all experts replaced by one for each."""
    experts = [mlp for layer in config.layers if (mlp := experts_of(layer.mlp))]
    tensors = dict(stored)
    if not experts:
        return tensors
    layout = _layout(stored, experts[0], config.hidden_size)
    for name, tensor in stored.items():
        match = FUSED.fullmatch(name) if layout else None
        if layout and match and len(tensor.shape) == (2 if match["bias"] else 3):
            del tensors[name]
            suffix = "bias" if match["bias"] else "weight"
            for expert in range(tensor.shape[0]):
                for projection, part in _parts(tensor, match["kind"], expert, layout).items():
                    tensors[f"{match['experts']}.{expert}.{projection}.{suffix}"] = part
        elif name.endswith(CORRECTION) and len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensors[name] = OneRow(tensor)
    return tensors


def _layout(
    stored: Mapping[str, CheckpointTensor], mlp: ExpertsConfig, hidden_size: int
) -> Fused | None:
    """How a checkpoint has its experts. Files of ``halves`` are published as that, and written by
    transformers 5 as ``stacked``: shapes differ in one of the projections at least."""
    if mlp.fused != "halves":
        return mlp.fused
    size = mlp.intermediate_size
    halves = {"gate_up_proj": (hidden_size, 2 * size), "down_proj": (size, hidden_size)}
    matches = ((FUSED.fullmatch(name), tensor.shape[1:]) for name, tensor in stored.items())
    agree = all(shape == halves.get(match["kind"], shape) for match, shape in matches if match)
    return "halves" if agree else "stacked"


def _parts(tensor: CheckpointTensor, kind: str, expert: int, fused: Fused) -> dict[str, OfExpert]:
    """The projections of an expert in a tensor, by name."""
    interleaved, inputs_first = fused == "interleaved", fused != "stacked"
    total = tensor.shape[-1 if inputs_first else 1]

    def part(first: int, step: int, size: int) -> OfExpert:
        return OfExpert(tensor, expert, first, step, size, inputs_first)

    if kind != "gate_up_proj":
        return {kind: part(0, 1, total)}
    size, step = total // 2, 2 if interleaved else 1
    return {
        "gate_proj": part(0, step, size),
        "up_proj": part(1 if interleaved else size, step, size),
    }
