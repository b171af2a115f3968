"""The host loop of a training run: number of steps, checkpoints, evaluations, log records."""

import abc
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jax.stages import Lowered

from jaxspec.engine import memory
from jaxspec.training.run_folder import RunFolder
from jaxspec.training.schedule import UNKNOWN_STEPS, Pace, Schedule


@dataclasses.dataclass(frozen=True)
class Record:
    """What every line of a training log has. Seconds count from the start.

    ``saved``: a checkpoint of this step was written. The others are None if nothing was trained
    since the last record.
    """

    step: int
    total_steps: int | None  # None: not known yet
    tokens: int
    seconds: float
    saved: bool = False
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    held_out_loss: Any = None


class Program(NamedTuple):
    """``name`` and ``advice`` are for the error of a program that does not fit: what it is, and
    what would make it smaller."""

    name: str
    lowered: Lowered
    advice: str


class TrainingRun[R: Record](abc.ABC):
    """A training run in a folder: checkpoints, and log.jsonl of records.

    A subclass sets what its methods need, then calls ``open``.
    """

    record_type: type[R]
    loss_name: ClassVar[str] = "loss"  # the metric that must stay finite

    schedule: Schedule
    decay_fraction: float  # the share of the steps in which the learning rate falls
    tokens_per_step: int
    state: Any  # arrays: what a checkpoint holds

    def open(self, directory: Path, fingerprint: dict[str, Any], resume: bool) -> None:
        """Begin a new run, or with ``resume`` go on from the last checkpoint.

        Args:
          fingerprint: what must not change between a checkpoint and the run that resumes from it.

        Raises ValueError if there is no checkpoint, or it is of another run.
        """
        steps = self.schedule.steps
        self.step, self.total_steps = 0, UNKNOWN_STEPS if steps is None else steps
        self.records: list[R] = []
        self._folder = RunFolder(directory, fingerprint, resume)
        if resume:
            self.step, self.state, total, lines = self._folder.restore(self.state)
            self.total_steps = total if steps is None else steps
            self.records = [self.record_type(**line) for line in lines]

    @abc.abstractmethod
    def programs(self) -> list[Program]:
        """What the run will call on the device."""

    @abc.abstractmethod
    def train(self, count: int) -> dict[str, Any]:
        """Take ``count`` steps; the metrics, as fields of a record, when they are done."""

    @abc.abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """The held-out fields of a record."""

    def run(self, note: Callable[[str], None] = lambda text: None) -> Iterator[R]:
        """Train to the end, yielding a record at the start and after each call on the device.

        A checkpoint is written before a record with ``saved`` is yielded. The first and the last
        record have it set: a folder that cannot be written fails before any time is spent.

        Args:
          note: called with a short description when a long operation begins.
        """
        started, pace = time.monotonic(), Pace(self.schedule, self.decay_fraction)
        before = self.records[-1].seconds if self.records else 0.0
        note("compiling")  # before the first call, so that its time does not include compilation
        _compile(self.programs())
        if not self.records:
            note("evaluating")
            saving = time.monotonic()
            yield self._add(self._save(self._evaluated(self._record(0.0))))
            pace.saved(time.monotonic() - saving)
        note("training")
        pace.begins(self.step)
        while self.step < self.total_steps:
            count = pace.steps_of_call(self.step, self.total_steps)
            call_started = time.monotonic()
            metrics = self.train(count)
            if not math.isfinite(loss := metrics[self.loss_name]):
                raise ValueError(f"the loss became {loss}: lower the learning rate")
            self.step += count
            now = time.monotonic()
            pace.ended(count, now - call_started)
            rate = count * self.tokens_per_step / (now - call_started)
            self.total_steps = pace.total_steps(self.step, self.total_steps)
            record = self._record(before + now - started, **metrics, tokens_per_second=rate)
            if self._due("evaluate_every"):
                record = self._evaluated(record)
            yield self._add(self._save(record) if self._due("save_every") else record)

    def _due(self, event: str) -> bool:
        return self.schedule.is_due(event, self.step, self.total_steps)

    def _record(self, seconds: float, **metrics: Any) -> R:
        return self.record_type(
            step=self.step,
            total_steps=None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            tokens=self.step * self.tokens_per_step,
            seconds=round(seconds, 3),
            **metrics,
        )

    def _evaluated(self, record: R) -> R:
        return dataclasses.replace(record, **self.evaluate())

    def _save(self, record: R) -> R:
        self._folder.save(self.step, self.total_steps, self.state)
        return dataclasses.replace(record, saved=True)

    def _add(self, record: R) -> R:
        self.records.append(record)
        self._folder.log(dataclasses.asdict(record))
        return record


def _compile(programs: Sequence[Program]) -> None:
    """Compile programs side by side, so that calls of their functions find them in jax's cache. XLA
    compiles without Python's lock.

    Raises ValueError, with its advice, for the first that needs more memory than the device has
    free.
    """
    with ThreadPoolExecutor(len(programs)) as pool:
        compiled = pool.map(lambda program: program.lowered.compile(), programs)
        for program, executable in zip(programs, compiled, strict=True):
            memory.check_program(executable, program.name, program.advice)
