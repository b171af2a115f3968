"""ModelOpt's tensors of all experts, as its files of Llama 4 and gpt-oss have them.

``<block>.experts.gate_up_proj`` has ``gate_up_proj_weight_scale`` beside it, and so has
``down_proj``. Their dimensions are those of the plain tensors, [E, in, out], or [E, out, in]:

- NVFP4: U8 [E, in / 2, out], scales e4m3 [E, in / 16, out], and ``..._weight_scale_2`` F32, which
  multiplies them, one number for all experts or one for each,
- FP8: e4m3 [E, in, out], and one scale for all experts or one for each.

Up stands behind gate; the outputs of the two take turns where they have biases, which gpt-oss alone
has. ``..._input_scale`` is not read. They become ``<block>.experts.<i>.gate_proj.weight`` with
``weight_scale`` and ``weight_scale_2``, and so on, as other files of ModelOpt have them.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxspec.checkpoints.formats.four_bits import E4M3
from jaxspec.checkpoints.formats.views import Tensors, check_shape, in_file
from jaxspec.checkpoints.fused_experts import OF_ALL, OfExpert
from jaxspec.models.tensors import CheckpointTensor

WEIGHT = re.compile(OF_ALL)
ENDS = ("_weight_scale", "_weight_scale_2", "_input_scale")
PAIR = ("gate_up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class OfOne:
    """The number of one expert in a vector of all experts', or the only one."""

    whole: CheckpointTensor
    expert: int

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
        return ()

    def read(self, *index: slice) -> np.ndarray:
        numbers = self.whole.read().reshape(-1)
        return numbers[self.expert if len(numbers) > 1 else 0]


@dataclasses.dataclass(frozen=True)
class OfAll:
    """A projection of all experts, or two of them, with its scales.

    Attributes:
      scale: of groups of inputs; None: there is ``factor`` alone.
      factor: one number, or one for each expert.
      inputs_first: the tensors are [E, in, out].
      take_turns: outputs of gate and up do.
    """

    weight: CheckpointTensor
    scale: CheckpointTensor | None
    factor: CheckpointTensor
    inputs_first: bool
    take_turns: bool

    @property
    def outputs(self) -> int:
        return self.weight.shape[2 if self.inputs_first else 1]

    def places(self, kind: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Each projection: its first output, the step to the next, and how many it has."""
        if kind != PAIR[0]:
            yield kind, (0, 1, self.outputs)
            return
        size = self.outputs // 2
        yield "gate_proj", (0, 2, size) if self.take_turns else (0, 1, size)
        yield "up_proj", (1, 2, size) if self.take_turns else (size, 1, size)

    def of(self, expert: int, place: tuple[int, int, int]) -> dict[str, CheckpointTensor]:
        """An expert's projection by the ends of its tensors' names."""

        def part(whole: CheckpointTensor) -> OfExpert:
            return OfExpert(whole, expert, *place, inputs_first=self.inputs_first)

        factor = OfOne(self.factor, expert)
        if self.scale is None:
            return {"weight": part(self.weight), "weight_scale": factor}
        scales = {"weight_scale": part(self.scale), "weight_scale_2": factor}
        return {"weight": part(self.weight), **scales}


def of_each_expert(stored: Tensors) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of all experts and their scales replaced by each one's.

    Raises ValueError that names the tensor which is missing or does not fit.
    """
    tensors = dict(stored)
    for name, weight in stored.items():
        match = WEIGHT.fullmatch(name)
        if match is None or weight.dtype not in ("U8", E4M3) or len(weight.shape) != 3:
            continue
        for end in ("", *ENDS):
            tensors.pop(f"{name}{end}", None)
        whole = _read(stored, name, match["experts"])
        for expert in range(weight.shape[0]):
            for projection, place in whole.places(match["kind"]):
                module = f"{match['experts']}.{expert}.{projection}"
                tensors |= {f"{module}.{end}": x for end, x in whole.of(expert, place).items()}
    return tensors


def _read(stored: Tensors, name: str, experts: str) -> OfAll:
    """Raises ValueError for scales that are missing or of other shapes."""
    weight, scale = stored[name], _scale_of(stored, name, ENDS[0])
    inputs_first = _has_inputs_first(stored, experts)
    count, *size = weight.shape
    factor = scale
    if weight.dtype == "U8":
        factor = _scale_of(stored, name, ENDS[1])
        size[0 if inputs_first else 1] //= 8  # two inputs of a byte, 16 of a scale
        check_shape(scale, (count, *size))
    if math.prod(factor.shape) not in (1, count):
        raise ValueError(
            f"{factor.name} is {list(factor.shape)}, but must be one number, or one for each of "
            f"{count} experts"
        )
    groups = scale if weight.dtype == "U8" else None
    return OfAll(weight, groups, factor, inputs_first, f"{name}_bias" in stored)


def _has_inputs_first(stored: Tensors, experts: str) -> bool:
    """Whether tensors are [E, in, out]: the two that a block has differ in shape by that. Bytes
    count as two inputs. Raises ValueError for tensors that are not of one block."""
    first, last = (stored.get(f"{experts}.{kind}") for kind in PAIR)
    if first is None or last is None:
        missing = PAIR[0] if first is None else PAIR[1]
        name = in_file(stored, experts)
        raise ValueError(f"{name}.{missing} is missing beside {name}.{PAIR[first is None]}")
    each = 2 if first.dtype == "U8" else 1
    gate_up, down = first.shape[1:], last.shape[1:]
    if gate_up == (down[1] // each, 2 * each * down[0]):
        return True
    if gate_up == (2 * each * down[1], down[0] // each):
        return False
    raise ValueError(
        f"{first.name} is {list(first.shape)} and {last.name} {list(last.shape)}, which are not of "
        "the same experts"
    )


def _scale_of(stored: Tensors, name: str, end: str) -> CheckpointTensor:
    if (scale := stored.get(f"{name}{end}")) is None:
        weight = stored[name]
        raise ValueError(
            f"{weight.name} is {weight.dtype}, but its scales, {weight.name}{end}, are missing"
        )
    return scale
