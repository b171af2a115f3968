"""Training of a draft head: the order of its data, its steps and its evaluations."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

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
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.data import Examples, spread_rows
from jaxspec.training.heads.loss import DraftBatch
from jaxspec.training.heads.step import DraftTrainConfig, Head
from jaxspec.training.held_out import HeldOut, batches_of
from jaxspec.training.run import Program, Record, TrainingRun
from jaxspec.training.run_folder import batch_shardings
from jaxspec.training.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class DraftRecord(Record):
    """One line of the training log. Lists have one entry per depth of a draft."""

    total_loss: float | None = None  # None: nothing trained since the last record
    loss: list[float] | None = None
    accuracy: list[float] | None = None
    overlap: list[float] | None = None
    confidence: list[float] | None = None  # this and the next: of a head that has a confidence head
    confidence_error: list[float] | None = None
    held_out_loss: list[float] | None = None
    held_out_accuracy: list[float] | None = None
    held_out_overlap: list[float] | None = None
    held_out_confidence: list[float] | None = None
    held_out_confidence_error: list[float] | None = None


class DraftData(NamedTuple):
    """The rows of a training."""

    train: Examples
    held_out: Examples


class DraftTraining(TrainingRun[DraftRecord]):
    """Training of a head in the folder ``directory``: checkpoints, and log.jsonl of DraftRecords.

    Args:
      head: float32, as step.init_head or block_init.init_block_head makes it.
      target: in the compute dtype.
      data_parallel: devices that each batch is split over.

    Raises ValueError for too few rows, or a checkpoint that does not fit.
    """

    record_type, loss_name = DraftRecord, "total_loss"

    def __init__(
        self,
        head: Head,
        target: Decoder,
        config: DraftTrainConfig,
        data: DraftData,
        schedule: Schedule,
        directory: Path,
        *,
        resume: bool = False,
        data_parallel: int = 1,
    ):
        train = data.train
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
        self.config, self.schedule, self._data = config, schedule, data
        self.decay_fraction = config.decay_fraction
        self.tokens_per_step = config.batch_size * train.tokens.shape[1]
        replicated, split = batch_shardings(config.batch_size // config.accumulation, data_parallel)
        self._split = split
        self._target = jax.device_put(target, replicated)
        windows = held_out_batches(data.held_out, config, schedule)
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
        self.state = jax.device_put(draft_step.init_state(head, config), replicated)
        self.open(directory, self._fingerprint(), resume)

    @property
    def head(self) -> Head:
        """The weights so far, float32."""
        return self.state.head

    @property
    def target(self) -> Decoder:
        """In the compute dtype."""
        return self._target

    def programs(self) -> list[Program]:
        (batch,) = self._batches(1)
        training = draft_step.one_step.lower(
            self.state, self._target, batch, self.total_steps, self.config
        )
        evaluation = draft_step.evaluate.lower(
            self.head, self._target, self._held_out.first, self.config
        )
        advice = "give a smaller batch, shorter rows or more accumulation"
        return [
            Program("a training step", training, advice),
            Program("an evaluation", evaluation, advice),
        ]

    def train(self, count: int) -> dict[str, Any]:
        self.state, means = draft_step.train_steps(
            self.state, self._target, self._batches(count), self.total_steps, self.config
        )
        return {name: value.tolist() for name, value in means.items()}

    def evaluate(self) -> dict[str, Any]:
        found = self._held_out.evaluate(
            lambda batch: draft_step.evaluate(self.head, self._target, batch, self.config)
        )
        batches = (jax.tree.map(lambda x: x[0], batch) for batch in self._held_out.batches)
        counts = np.array([self.config.loss.counts(batch) for batch in batches])
        return {
            f"held_out_{name}": np.average(
                np.array([metrics[name] for metrics in found]), axis=0, weights=counts
            ).tolist()
            for name in found[0]
        }

    def _batches(self, count: int) -> list[DraftBatch]:
        """The batches of the next ``count`` steps."""
        return [self._batch(self.step + index) for index in range(count)]

    def _batch(self, step: int) -> DraftBatch:
        rows, train = self._rows(step), self._data.train
        batch = DraftBatch(
            tokens=train.tokens[rows],  # pyright: ignore[reportArgumentType]
            learned=train.learned[rows],  # pyright: ignore[reportArgumentType]
        )
        random = np.random.default_rng((self.config.seed, step, 1))  # other than the rows' order
        return jax.device_put(self.config.loss.drawn(batch, random), self._split)

    def _rows(self, step: int) -> np.ndarray:
        """Rows of a step's batch. Each epoch has another order, fixed by the seed."""
        size, count = self.config.batch_size, len(self._data.train)
        epoch, index = divmod(step, count // size)
        order = np.random.default_rng((self.config.seed, epoch)).permutation(count)
        return order[index * size : (index + 1) * size]

    def _fingerprint(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that resumes from it."""
        ids = self.head.token_ids if isinstance(self.head, DraftHead) else None
        return {
            "head": static_choices(self.head),
            "token_ids": fingerprint.of_weights(ids),
            "target": fingerprint.of_weights(self._target),
            "config": dataclasses.asdict(self.config),
            "data": fingerprint.of_rows(self._data.train.tokens, self._data.train.learned),
        }


def held_out_batches(
    held_out: Examples, config: DraftTrainConfig, schedule: Schedule
) -> DraftBatch:
    """Evenly spaced rows as batches [E, B, T] with the loss's choices, about
    ``schedule.evaluation_tokens`` in all.

    If there are fewer rows than one batch, the batch size is halved until there are enough.
    """
    length = held_out.tokens.shape[1]
    available = max(1, min(len(held_out), schedule.evaluation_tokens // length))
    batches, size = batches_of(available, config.batch_size // config.accumulation)
    rows = spread_rows(len(held_out), batches * size).reshape(batches, size)
    batch = DraftBatch(
        tokens=jnp.asarray(held_out.tokens[rows]), learned=jnp.asarray(held_out.learned[rows])
    )
    return jax.tree.map(jnp.asarray, config.loss.drawn(batch, np.random.default_rng(config.seed)))
