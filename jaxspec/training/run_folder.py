"""A training run on disk: checkpoints to resume from, and a log."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.parallel import DATA_AXIS, make_mesh

MAX_KEPT = 2


class RunFolder:
    """The folder ``directory`` with ``checkpoints/`` and ``log.jsonl``.

    A new run deletes the checkpoints and the log of an earlier one; a resumed run continues from
    the latest checkpoint.

    Args:
      fingerprint: JSON values that must be the same in a checkpoint and the run that resumes it.
    """

    def __init__(self, directory: Path, fingerprint: dict[str, Any], resume: bool):
        directory.mkdir(parents=True, exist_ok=True)
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._log = directory / "log.jsonl"
        self._manager = ocp.CheckpointManager(
            (directory / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=MAX_KEPT),
        )
        if not resume:
            for step in self._manager.all_steps():
                self._manager.delete(step)
            self._log.write_text("")

    def save(self, step: int, total_steps: int, state: Any) -> None:
        """Write a checkpoint, and wait until it is on disk."""
        position = {"total_steps": total_steps, "run": self._fingerprint}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, state: Any) -> tuple[int, Any, int, list[dict[str, Any]]]:
        """(step, state, total steps, log records up to that step) of the latest checkpoint.

        Args:
          state: arrays of the wanted shapes, dtypes and shardings.

        Raises ValueError if there is no checkpoint, or it is of another run.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"no checkpoint to resume from in {self._manager.directory}")
        position = self._manager.restore(
            step, args=ocp.args.Composite(position=ocp.args.JsonRestore())
        )["position"]
        if position["run"] != self._fingerprint:
            raise ValueError("the checkpoint is of another model, data or training configuration")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        state = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        )["state"]
        if not self._log.exists():
            raise ValueError(f"{self._log} is missing: a run cannot go on without its log")
        whole_lines = self._log.read_text().split("\n")[:-1]  # a killed run may have cut one short
        records = [line for line in map(json.loads, whole_lines) if line["step"] <= step]
        self._log.write_text("".join(map(_line, records)))
        return step, state, position["total_steps"], records

    def log(self, record: dict[str, Any]) -> None:
        """Append a record, which must have the key ``step``."""
        with self._log.open("a") as log:
            log.write(_line(record))


def check_resumable(directory: Path) -> None:
    """Raise ValueError if a run in ``directory`` left no checkpoint."""
    folder = directory / "checkpoints"
    if not folder.is_dir() or not any(child.name.isdigit() for child in folder.iterdir()):
        raise ValueError(
            f"no checkpoint to resume from in {folder}: run without --resume (answers that were "
            "written there are used)"
        )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def batch_shardings(batch_size: int, devices: int) -> tuple[NamedSharding, NamedSharding | None]:
    """Shardings (replicated, batch split over the devices); the second is None for one device.

    Raises ValueError for a batch that cannot be split evenly.
    """
    if batch_size % devices:
        raise ValueError(f"batch size {batch_size} cannot be split over {devices} devices")
    mesh = make_mesh(data_parallel=devices)
    split = NamedSharding(mesh, P(DATA_AXIS)) if devices > 1 else None
    return NamedSharding(mesh, P()), split
