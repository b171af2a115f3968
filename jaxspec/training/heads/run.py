"""The host loop around draft_step.train_steps: order of the data, checkpoints and log records."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoints.orbax_io import static_choices
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.parallel import DATA_AXIS
from jaxspec.training import fingerprint
from jaxspec.training.compiling import Program, compile_together
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.data import Examples, spread_rows
from jaxspec.training.heads.loss import DraftBatch
from jaxspec.training.heads.states import StoredStates
from jaxspec.training.heads.step import DraftTrainConfig, Head
from jaxspec.training.held_out import HeldOut
from jaxspec.training.run_folder import RunFolder, batch_shardings
from jaxspec.training.schedule import UNKNOWN_STEPS, Pace, Schedule


@dataclasses.dataclass(frozen=True)
class DraftRecord:
    """One line of the training log. Lists have one entry per depth of a draft."""

    step: int
    total_steps: int | None  # None: not known yet
    tokens: int
    seconds: float
    total_loss: float | None = None  # None: nothing trained since the last record
    loss: list[float] | None = None
    accuracy: list[float] | None = None
    overlap: list[float] | None = None
    confidence: list[float] | None = None  # this and the next: of a head that has a confidence head
    confidence_error: list[float] | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    held_out_loss: list[float] | None = None
    held_out_accuracy: list[float] | None = None
    held_out_overlap: list[float] | None = None
    held_out_confidence: list[float] | None = None
    held_out_confidence_error: list[float] | None = None
    saved: bool = False


class DraftTraining:
    """Training of a head in the folder ``directory``: checkpoints, and log.jsonl of DraftRecords.

    Args:
      head: float32, as made by draft_step.init_head or block_init.init_block_head.
      target: in the compute dtype.
      states: the target's hidden states of the training rows, if they were captured before.
      data_parallel: devices that each batch is split over.

    Raises ValueError for too few rows, or a checkpoint that does not fit.
    """

    def __init__(
        self,
        head: Head,
        target: Decoder,
        config: DraftTrainConfig,
        train: Examples,
        held_out: Examples,
        schedule: Schedule,
        directory: Path,
        *,
        states: StoredStates | None = None,
        resume: bool = False,
        data_parallel: int = 1,
    ):
        if len(train) < config.batch_size:
            raise ValueError(
                f"{len(train)} training rows are fewer than one batch of {config.batch_size}: "
                "give more data, more time for answers, or a smaller batch or row length"
            )
        if not train.learned[:, config.loss.steps + 1 :].any():
            raise ValueError(
                f"rows of {train.tokens.shape[1]} tokens leave nothing to learn to "
                f"{config.loss.steps} steps of a draft: give longer rows or fewer steps"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.config, self.schedule, self._train, self._states = config, schedule, train, states
        replicated, split = batch_shardings(config.batch_size // config.accumulation, data_parallel)
        self._split = split
        self._target = jax.device_put(target, replicated)
        windows = held_out_batches(held_out, config, schedule)
        whole = None if split is None else NamedSharding(split.mesh, P(None, DATA_AXIS))
        even = windows.tokens.shape[1] % data_parallel == 0
        # Each is [1, B, T], so that one program runs them all and time is checked between them.
        batches = [
            jax.device_put(
                jax.tree.map(lambda x, i=i: x[i : i + 1], windows), whole if even else replicated
            )
            for i in range(windows.tokens.shape[0])
        ]
        self._held_out = HeldOut(batches, schedule)
        state = draft_step.init_state(head, config)
        self.state = jax.device_put(state, replicated)
        self.step, self.total_steps = 0, UNKNOWN_STEPS if schedule.steps is None else schedule.steps
        self.records: list[DraftRecord] = []
        self._folder = RunFolder(directory, self._fingerprint(), resume)
        if resume:
            self.step, self.state, total, lines = self._folder.restore(self.state)
            self.total_steps = total if schedule.steps is None else schedule.steps
            self.records = [DraftRecord(**line) for line in lines]

    @property
    def head(self) -> Head:
        """The weights so far, float32."""
        return self.state.head

    @property
    def target(self) -> Decoder:
        """In the compute dtype."""
        return self._target

    def run(self, note: Callable[[str], None] = lambda text: None) -> Iterator[DraftRecord]:
        """Train to the end, yielding a record at the start and after each call on the device.

        A checkpoint is written before a record with ``saved`` is yielded. The first and the last
        record have it set: a folder that cannot be written fails before any time is spent.

        Args:
          note: called with a short description when a long operation begins.
        """
        started, pace = time.monotonic(), Pace(self.schedule, self.config.decay_fraction)
        before = self.records[-1].seconds if self.records else 0.0
        self._compile(note)
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
            self.state, means = draft_step.train_steps(
                self.state, self._target, self._batches(count), self.total_steps, self.config
            )
            metrics = {name: value.tolist() for name, value in means.items()}
            if not math.isfinite(metrics["total_loss"]):
                raise ValueError(
                    f"the loss became {metrics['total_loss']}: lower the learning rate"
                )
            self.step += count
            now = time.monotonic()
            pace.ended(count, now - call_started)
            rate = self._tokens(count) / (now - call_started)
            self.total_steps = pace.total_steps(self.step, self.total_steps)
            record = self._record(before + now - started, **metrics, tokens_per_second=rate)
            if self._due("evaluate_every"):
                record = self._evaluated(record)
            yield self._add(self._save(record) if self._due("save_every") else record)

    def _compile(self, note: Callable[[str], None]) -> None:
        """Compile before the first call, so that its time does not include compilation."""
        note("compiling")
        (batch,) = self._batches(1)
        training = draft_step.one_step.lower(
            self.state, self._target, batch, self.total_steps, self.config
        )
        evaluation = draft_step.evaluate.lower(
            self.head, self._target, self._held_out.first, self.config
        )
        advice = "give a smaller batch, shorter rows or more accumulation"
        compile_together(
            [
                Program("a training step", training, advice),
                Program("an evaluation", evaluation, advice),
            ]
        )

    def _tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self._train.tokens.shape[1]

    def _due(self, event: str) -> bool:
        return self.schedule.is_due(event, self.step, self.total_steps)

    def _batches(self, count: int) -> list[DraftBatch]:
        """The batches of the next ``count`` steps."""
        return [self._batch(self.step + index) for index in range(count)]

    def _batch(self, step: int) -> DraftBatch:
        rows = self._rows(step)
        batch: Any = DraftBatch(
            tokens=self._train.tokens[rows],  # pyright: ignore[reportArgumentType]
            learned=self._train.learned[rows],  # pyright: ignore[reportArgumentType]
        )
        if self._states is not None:
            features, hidden = self._states.read(rows)
            batch = batch.replace(features=features, hidden=hidden)
        random = np.random.default_rng((self.config.seed, step, 1))  # apart from the rows' order
        return jax.device_put(self.config.loss.drawn(batch, random), self._split)

    def _rows(self, step: int) -> np.ndarray:
        """Rows of a step's batch. Each epoch has its own order, fixed by the seed."""
        size, per_epoch = self.config.batch_size, len(self._train) // self.config.batch_size
        epoch, index = divmod(step, per_epoch)
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self._train))
        return order[index * size : (index + 1) * size]

    def _record(self, seconds: float, **metrics: Any) -> DraftRecord:
        return DraftRecord(
            step=self.step,
            total_steps=None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            tokens=self._tokens(self.step),
            seconds=round(seconds, 3),
            **metrics,
        )

    def _evaluated(self, record: DraftRecord) -> DraftRecord:
        found = self._held_out.evaluate(
            lambda one: draft_step.evaluate(self.head, self._target, one, self.config)
        )
        batches = (jax.tree.map(lambda x: x[0], one) for one in self._held_out.batches)
        counts = [self.config.loss.counts(batch) for batch in batches]
        values = {
            f"held_out_{name}": np.average(
                np.array([metrics[name] for metrics in found]), axis=0, weights=np.array(counts)
            ).tolist()
            for name in found[0]
        }
        return dataclasses.replace(record, **values)

    def _save(self, record: DraftRecord) -> DraftRecord:
        self._folder.save(self.step, self.total_steps, self.state)
        return dataclasses.replace(record, saved=True)

    def _add(self, record: DraftRecord) -> DraftRecord:
        self.records.append(record)
        self._folder.log(dataclasses.asdict(record))
        return record

    def _fingerprint(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that resumes from it."""
        ids = self.head.token_ids if isinstance(self.head, DraftHead) else None
        return {
            "head": static_choices(self.head),
            "token_ids": fingerprint.of_weights(ids),
            "target": fingerprint.of_weights(self._target),
            "config": dataclasses.asdict(self.config),
            "data": fingerprint.of_rows(self._train.tokens, self._train.learned),
        }


def held_out_batches(
    held_out: Examples, config: DraftTrainConfig, schedule: Schedule
) -> DraftBatch:
    """Evenly spaced rows as batches [E, B, T] with the loss's choices, about
    ``schedule.evaluation_tokens`` in all.

    If there are fewer rows than one batch, the batch size is halved until there are enough.
    """
    length, batch = held_out.tokens.shape[1], config.batch_size // config.accumulation
    available = max(1, min(len(held_out), schedule.evaluation_tokens // length))
    while batch > available:
        batch = -(-batch // 2)
    count = available // batch * batch
    rows = spread_rows(len(held_out), count).reshape(-1, batch)
    batch = DraftBatch(
        tokens=jnp.asarray(held_out.tokens[rows]), learned=jnp.asarray(held_out.learned[rows])
    )
    return jax.tree.map(jnp.asarray, config.loss.drawn(batch, np.random.default_rng(config.seed)))
