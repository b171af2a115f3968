"""Quantizes a checkpoint, one layer at a time; a run that was killed goes on."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models.norms import rms_norm
from jaxspec.quantize.checkpoint import Checkpoint, Unit, layer_kinds
from jaxspec.quantize.compiled import program
from jaxspec.quantize.layers import (
    Batch,
    InputStatistics,
    LayerKind,
    added,
    advance,
    embedded,
    nothing_seen,
)
from jaxspec.quantize.methods import QuantizedLayer, gptq_part, joined, quantize_layer, round_part
from jaxspec.quantize.rounding import Grid, Rounded, round_to_float8, round_to_nearest
from jaxspec.quantize.work_folder import WorkFolder
from jaxspec.quantize.writing import (
    Named,
    QuantizationPlan,
    check_plan,
    module_tensors,
    write_checkpoint,
)


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens to calibrate with, int [N, T], and which of them are no padding, bool [N, T].

    ``batch``: rows that a layer runs over at a time.
    """

    tokens: np.ndarray
    valid: np.ndarray
    batch: int

    def __post_init__(self):
        if not self.valid.any():
            raise ValueError("there is no calibration text")

    def digest(self) -> str:
        parts = (self.tokens.astype(np.int64).tobytes(), self.valid.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished unit: which of how many, and the error of each projection's outputs, by name.

    ``resumed``: an earlier run had finished it.
    """

    index: int
    units: int
    errors: dict[str, float]
    resumed: bool


class Quantization:
    """A run. ``text`` None: nothing is calibrated, and no error of outputs is known.

    Raises ValueError for a plan that needs more than it has, or that the format cannot hold.
    """

    def __init__(
        self, checkpoint: Checkpoint, plan: QuantizationPlan, text: Text | None, work: Path
    ):
        if checkpoint.config is None and plan.method not in ("rtn", "fp8"):
            raise ValueError(
                f"a draft head is rounded without calibration: take rtn or fp8, not {plan.method}"
            )
        if text is None and plan.method in ("awq", "gptq"):
            raise ValueError(f"{plan.method} needs text to calibrate with: give --data")
        self._checkpoint, self._plan = checkpoint, plan
        has_use = checkpoint.config is not None and plan.method != "fp8"
        self._text = text if has_use else None
        self._units = checkpoint.units(lm_head=plan.lm_head)
        check_plan(plan, checkpoint.shapes(self._units))
        self._kinds = [] if checkpoint.config is None else layer_kinds(checkpoint.config)
        for kind in dict.fromkeys(self._kinds):
            kind.check()
        self._work = WorkFolder(work, self._fingerprint())

    def _fingerprint(self) -> dict[str, Any]:
        plan = dataclasses.asdict(self._plan)
        for name in ("format", "activations"):  # the same numbers may be written otherwise
            del plan[name]
        text = None if self._text is None else [self._text.digest(), self._text.batch]
        return {**plan, "model": self._checkpoint.fingerprint(), "text": text}

    def run(self) -> Iterator[Done]:
        """Quantize what is not finished yet. Each unit is on disk when it is reported."""
        batches = None if self._text is None else self._embedded(self._text)
        for index, unit in enumerate(self._units):
            tensors = self._checkpoint.tensors(unit)
            resumed = self._work.has(index)
            if resumed:
                found = self._work.load(index)
            else:
                found = self._quantize(index, unit, tensors, batches)
                self._work.save(index, found)
            errors = {f"{unit.prefix}{name}": error for name, error in found.errors.items()}
            yield Done(index, len(self._units), errors, resumed)
            if batches is not None and index + 1 < len(self._units):
                # GPTQ makes up for the errors of the layers before; the others take them as given.
                after = found.applied(tensors) if self._plan.method == "gptq" else tensors
                batches = advance(after, batches, self._kinds[index])

    def write(self, out: Path) -> None:
        """Write the finished run as a checkpoint. config.json is written last."""
        source = self._checkpoint
        write_checkpoint(source.directory, source.raw, self._tensors(), self._plan, out)

    def clean(self) -> None:
        """Delete the files of the run: it cannot be written once more."""
        self._work.delete()

    def _tensors(self) -> Iterator[Named]:
        """All tensors of the quantized checkpoint, a few at a time."""
        rest = dict(self._checkpoint.stored)
        for index, unit in enumerate(self._units):
            found, named = self._work.load(index), dict[str, np.ndarray]()
            for name, rounded in found.projections.items():
                module = f"{unit.prefix}{name}"
                named |= module_tensors(module, rounded, self._plan)
                del rest[f"{module}.weight"]
            for name in [name for name in rest if unit.prefix and name.startswith(unit.prefix)]:
                changed = found.changed.get(name.removeprefix(unit.prefix))
                named[name] = np.asarray(changed) if changed is not None else rest[name].read()
                del rest[name]
            yield named
        for name, tensor in rest.items():
            yield {name: tensor.read()}

    def _embedded(self, text: Text) -> list[Batch]:
        return embedded(self._checkpoint.embedding(), text.tokens, text.valid, text.batch)

    def _quantize(
        self, index: int, unit: Unit, tensors: dict[str, Array], batches: list[Batch] | None
    ) -> QuantizedLayer:
        plan = self._plan
        if batches is None:
            return self._round(unit, tensors)
        if unit.prefix:
            kind = self._kinds[index]
            return quantize_layer(plan.method, tensors, batches, kind, plan.grid, plan.gptq)
        norm = jnp.asarray(self._checkpoint.stored["model.norm.weight"].read())
        hessian = _normed_statistics(batches, norm, self._kinds[-1]).hessian
        weights = {name: tensors[f"{name}.weight"] for name in unit.projections}
        if plan.method == "gptq":
            return joined([gptq_part(weights, hessian, plan.grid, plan.gptq)], {})
        return joined([round_part(weights, hessian, None, plan.grid)], {})

    def _round(self, unit: Unit, tensors: dict[str, Array]) -> QuantizedLayer:
        """Without text: every projection by itself."""
        weights = {name: tensors[f"{name}.weight"] for name in unit.projections}
        if self._plan.method == "fp8":
            wide = {name: weight.astype(jnp.float32) for name, weight in weights.items()}
            return QuantizedLayer({n: round_to_float8(w) for n, w in wide.items()}, {}, {})
        return QuantizedLayer(_nearest(weights, self._plan.grid), {}, {})


@functools.partial(program, static_argnames=("grid",))
def _nearest(weights: dict[str, Array], grid: Grid) -> dict[str, Rounded]:
    return {name: round_to_nearest(weight, grid) for name, weight in weights.items()}


def _normed_statistics(batches: Sequence[Batch], norm: Array, kind: LayerKind) -> InputStatistics:
    """Sums over the inputs of the LM head."""
    [total] = nothing_seen((len(norm),))
    for batch in batches:
        total = _add_normed(total, batch.states, batch.valid, norm, kind.eps)
    return total


@functools.partial(program, static_argnames=("eps",), donate_argnames=("total",))
def _add_normed(
    total: InputStatistics, states: Array, valid: Array, norm: Array, eps: float
) -> InputStatistics:
    return added(total, rms_norm(states, norm, eps), valid)
