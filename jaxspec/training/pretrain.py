"""The host loop around lm.train_steps: pace, checkpoints, evaluation and records."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import DATA_AXIS, make_mesh
from jaxspec.training import lm
from jaxspec.training.data import Corpus
from jaxspec.training.lm import TrainConfig

UNKNOWN_STEPS = 1 << 30  # total steps while a time budget has not been measured against yet
MAX_KEPT = 2
SLACK = 1.1  # lest the deadline cuts off the end of the learning rate's fall


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When to stop and what to do on the way.

    Attributes:
      steps: total steps, or None to take as many as fit before ``deadline``.
      deadline: time.monotonic() at which training must have ended, or None.
      steps_per_call: steps that one call of the device program takes at most.
      evaluate_every, save_every: steps between evaluations and between checkpoints.
      evaluation_tokens: held-out tokens of one evaluation.
    """

    steps: int | None = None
    deadline: float | None = None
    steps_per_call: int = 20
    evaluate_every: int = 500
    save_every: int = 1000
    evaluation_tokens: int = 1 << 20

    def __post_init__(self):
        if (self.steps is None) == (self.deadline is None):
            raise ValueError("give either a number of steps or a time budget")
        if min(self.steps or 1, self.steps_per_call, self.evaluate_every, self.save_every) < 1:
            raise ValueError("steps, and steps between events, must be at least 1")


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the training log. Losses are nats a token, seconds are since the start."""

    step: int
    total_steps: int | None  # None: not known yet
    tokens: int
    seconds: float
    loss: float | None  # None: nothing trained since the last record
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    held_out_loss: float | None = None
    bits_per_byte: float | None = None
    saved: bool = False


class Pace:
    """Total steps under a time budget: re-estimated until the learning rate begins to fall."""

    def __init__(self, schedule: Schedule, decay_fraction: float):
        self._deadline = schedule.deadline
        self._steady = 1 - decay_fraction
        self._first: tuple[int, float] | None = None

    def total_steps(self, step: int, total: int) -> int:
        """The new total after ``step`` steps have ended now; never less than ``step``."""
        now = time.monotonic()
        if self._deadline is None:
            return total
        if now >= self._deadline:
            return step
        if self._first is None:  # this call's time included the compilation
            self._first = step, now
            return total
        if total != UNKNOWN_STEPS and step >= self._steady * total:
            return total
        first_step, first_time = self._first
        seconds_per_step = SLACK * (now - first_time) / (step - first_step)
        return step + int((self._deadline - now) / seconds_per_step)


class Pretraining:
    """A training run in the folder ``directory``: checkpoints, and log.jsonl of Records.

    Batches are split over the first ``data_parallel`` devices.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainConfig,
        corpus: Corpus,
        schedule: Schedule,
        directory: Path,
        resume: bool = False,
        data_parallel: int = 1,
    ):
        if len(corpus.train) <= config.context:
            raise ValueError(
                f"the training text has {len(corpus.train)} tokens, not more than the context "
                f"of {config.context}"
            )
        if len(corpus.train) >= 1 << 31:
            raise ValueError("more than 2^31 training tokens: offsets are int32")
        self.model, self.config, self.corpus, self.schedule = model, config, corpus, schedule
        self._replicated, self._batch_sharding = _shardings(config.batch_size, data_parallel)
        windows = lm.held_out_windows(corpus.held_out, config, schedule.evaluation_tokens)
        self._windows = jax.device_put(windows, self._replicated)
        self._tokens = jax.device_put(corpus.train, self._replicated)
        self.state = jax.device_put(lm.init_state(model, config), self._replicated)
        self.step, self.total_steps = 0, schedule.steps or UNKNOWN_STEPS
        self._log = directory / "log.jsonl"
        self._manager = _checkpoint_manager(directory / "checkpoints", resume)
        self.records = self._restore() if resume else []
        self._log.write_text("".join(_line(record) for record in self.records))

    @property
    def params(self) -> Decoder:
        """The weights so far, float32."""
        return self.state.params

    def run(self) -> Iterator[Record]:
        """Train to the end, yielding a record at the start and after each call on the device.

        A checkpoint is written before a record with ``saved`` is yielded. The first and the last
        are such: what cannot be saved fails before time is spent on it.
        """
        started, pace = time.monotonic(), Pace(self.schedule, self.config.decay_fraction)
        before = self.records[-1].seconds if self.records else 0.0
        if not self.records:
            yield self._add(self._save(self._record(0.0, None, 0.0, evaluated=True)))
        while self.step < self.total_steps:
            count, call_started = self._steps_of_call(), time.monotonic()
            self.state, metrics = lm.train_steps(
                self.state, self._tokens, count, self.total_steps, self.config, self._batch_sharding
            )
            metrics = {name: float(value) for name, value in metrics.items()}  # waits
            if not math.isfinite(metrics["loss"]):
                raise ValueError(f"the loss became {metrics['loss']}: lower the learning rate")
            self.step += count
            now = time.monotonic()
            rate = count * self.config.batch_size * self.config.context / (now - call_started)
            self.total_steps = pace.total_steps(self.step, self.total_steps)
            record = self._record(
                before + now - started, metrics, rate, evaluated=self._due("evaluate_every")
            )
            yield self._add(self._save(record) if self._due("save_every") else record)

    def _due(self, event: str) -> bool:
        return self.step % getattr(self.schedule, event) == 0 or self.step == self.total_steps

    def _steps_of_call(self) -> int:
        """Steps up to the next evaluation, checkpoint or end, at most those of one call."""
        events = self.schedule.evaluate_every, self.schedule.save_every
        return min(
            self.schedule.steps_per_call,
            self.total_steps - self.step,
            *(event - self.step % event for event in events),
        )

    def _record(
        self, seconds: float, metrics: dict[str, float] | None, rate: float, evaluated: bool
    ) -> Record:
        metrics = metrics or {}
        record = Record(
            step=self.step,
            total_steps=None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            tokens=self.step * self.config.batch_size * self.config.context,
            seconds=round(seconds, 3),
            loss=metrics.get("loss"),
            grad_norm=metrics.get("grad_norm"),
            learning_rate=metrics.get("learning_rate"),
            tokens_per_second=rate or None,
        )
        if not evaluated:
            return record
        value = float(lm.evaluate(self.params, self._windows, self.config))
        report = self.corpus.report
        bits = value / math.log(2) * report.held_out_tokens / report.held_out_bytes
        return dataclasses.replace(record, held_out_loss=value, bits_per_byte=bits)

    def _save(self, record: Record) -> Record:
        position = {"total_steps": self.total_steps, "run": self._fingerprint()}
        self._manager.save(
            self.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(self.state), position=ocp.args.JsonSave(position)
            ),
        )
        self._manager.wait_until_finished()
        return dataclasses.replace(record, saved=True)

    def _add(self, record: Record) -> Record:
        self.records.append(record)
        with self._log.open("a") as log:
            log.write(_line(record))
        return record

    def _restore(self) -> list[Record]:
        """Load the latest checkpoint; returns the records up to it."""
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"no checkpoint to resume from in {self._manager.directory}")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        position = self._manager.restore(
            step, args=ocp.args.Composite(position=ocp.args.JsonRestore())
        )["position"]
        if position["run"] != self._fingerprint():
            raise ValueError("the checkpoint is of another model, data or training configuration")
        self.state = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        )["state"]
        self.step = step
        self.total_steps = self.schedule.steps or position["total_steps"]
        records = [Record(**json.loads(line)) for line in self._log.read_text().splitlines()]
        return [record for record in records if record.step <= step]

    def _fingerprint(self) -> dict[str, object]:
        """What must not change between a checkpoint and its continuation, as JSON values."""
        described = {
            "model": dataclasses.asdict(self.model),
            "config": dataclasses.asdict(self.config),
            "tokens": [len(self.corpus.train), int(np.sum(self.corpus.train, dtype=np.int64))],
        }
        return json.loads(json.dumps(described))


def _line(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"


def _shardings(batch_size: int, devices: int) -> tuple[NamedSharding, NamedSharding | None]:
    """(replicated over the devices, batches split over them; None for one device)."""
    if batch_size % devices:
        raise ValueError(f"batch size {batch_size} cannot be split over {devices} devices")
    mesh = make_mesh(data_parallel=devices)
    split = NamedSharding(mesh, P(DATA_AXIS)) if devices > 1 else None
    return NamedSharding(mesh, P()), split


def _checkpoint_manager(directory: Path, resume: bool) -> ocp.CheckpointManager:
    """Opens the folder; a fresh run drops the checkpoints of an earlier one."""
    manager = ocp.CheckpointManager(
        directory.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=MAX_KEPT)
    )
    if not resume:
        for step in manager.all_steps():
            manager.delete(step)
    return manager


def sample(
    params: Decoder, prompt: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Token ids of the prompt and ``num_tokens`` more; temperature 0 is greedy."""
    tokens = jnp.zeros(len(prompt) + num_tokens, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
    filled = lm.continue_text(params, tokens, len(prompt), temperature, jax.random.key(seed))
    return [int(token) for token in filled]
