"""The host loop around lm.train_steps: number of steps, checkpoints, evaluation, log records."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.training import fingerprint
from jaxspec.training.compiling import Program, compile_together
from jaxspec.training.data import Corpus
from jaxspec.training.held_out import HeldOut
from jaxspec.training.lm import model as lm
from jaxspec.training.lm.model import TrainConfig
from jaxspec.training.run_folder import RunFolder, batch_shardings
from jaxspec.training.schedule import UNKNOWN_STEPS, Pace, Schedule


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the training log. Losses are in nats per token, seconds count from the start."""

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


class Pretraining:
    """A training run in the folder ``directory``: checkpoints, and log.jsonl of Records.

    Batches are split over the first ``data_parallel`` devices.

    Args:
      sample_length: tokens, prompt included, of the texts that ``sample`` will write while this
        runs: their program is compiled beside the others. 0: none.
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
        sample_length: int = 0,
    ):
        if len(corpus.train) <= config.context:
            raise ValueError(
                f"the training text has {len(corpus.train)} tokens, not more than the context "
                f"of {config.context}"
            )
        if len(corpus.train) >= 1 << 31:
            raise ValueError("more than 2^31 training tokens: offsets are int32")
        self.model, self.config, self.corpus, self.schedule = model, config, corpus, schedule
        self._replicated, self._batch_sharding = batch_shardings(config.batch_size, data_parallel)
        windows = lm.held_out_windows(corpus.held_out, config, schedule.evaluation_tokens)
        # Each is [1, B, T + 1], so that one program runs them all and time is checked between them.
        batches = [jax.device_put(one[None], self._replicated) for one in windows]
        self._held_out = HeldOut(batches, schedule)
        self._tokens = jax.device_put(corpus.train, self._replicated)
        self.state = jax.device_put(lm.init_state(model, config), self._replicated)
        self.step, self.total_steps = 0, UNKNOWN_STEPS if schedule.steps is None else schedule.steps
        self.records: list[Record] = []
        self._sample_length = sample_length
        self._folder = RunFolder(directory, self._fingerprint(), resume)
        if resume:
            self.step, self.state, total, lines = self._folder.restore(self.state)
            self.total_steps = total if schedule.steps is None else schedule.steps
            self.records = [Record(**line) for line in lines]

    @property
    def params(self) -> Decoder:
        """The weights so far, float32."""
        return self.state.params

    def run(self, note: Callable[[str], None] = lambda text: None) -> Iterator[Record]:
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
            yield self._add(self._save(self._record(0.0, None, 0.0, evaluated=True)))
            pace.saved(time.monotonic() - saving)
        note("training")
        pace.begins(self.step)
        while self.step < self.total_steps:
            count = pace.steps_of_call(self.step, self.total_steps)
            call_started = time.monotonic()
            self.state, metrics = lm.train_steps(
                self.state, self._tokens, count, self.total_steps, self.config, self._batch_sharding
            )
            metrics = {name: float(value) for name, value in metrics.items()}  # waits
            if not math.isfinite(metrics["loss"]):
                raise ValueError(f"the loss became {metrics['loss']}: lower the learning rate")
            self.step += count
            now = time.monotonic()
            pace.ended(count, now - call_started)
            rate = count * self.config.batch_size * self.config.context / (now - call_started)
            self.total_steps = pace.total_steps(self.step, self.total_steps)
            record = self._record(
                before + now - started, metrics, rate, evaluated=self._due("evaluate_every")
            )
            yield self._add(self._save(record) if self._due("save_every") else record)

    def _compile(self, note: Callable[[str], None]) -> None:
        """Compile before the first call, so that its time does not include compilation."""
        note("compiling")
        training = lm.train_steps.lower(
            self.state, self._tokens, 1, self.total_steps, self.config, self._batch_sharding
        )
        evaluation = lm.evaluate.lower(self.params, self._held_out.first, self.config)
        advice = "give a smaller batch or context"
        programs = [
            Program("a training step", training, advice),
            Program("an evaluation", evaluation, advice),
        ]
        if self._sample_length:
            inputs = _sample_inputs([0], self._sample_length - 1, 0.0, 0)
            writing = lm.continue_text.lower(self.params, *inputs)
            programs.append(
                Program("a sample", writing, "give a shorter prompt or fewer tokens of the sample")
            )
        compile_together(programs)

    def _due(self, event: str) -> bool:
        return self.schedule.is_due(event, self.step, self.total_steps)

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
        found = self._held_out.evaluate(lambda one: lm.evaluate(self.params, one, self.config))
        value = float(np.mean(found))
        report = self.corpus.report
        bits = value / math.log(2) * report.held_out_tokens / report.held_out_bytes
        return dataclasses.replace(record, held_out_loss=value, bits_per_byte=bits)

    def _save(self, record: Record) -> Record:
        self._folder.save(self.step, self.total_steps, self.state)
        return dataclasses.replace(record, saved=True)

    def _add(self, record: Record) -> Record:
        self.records.append(record)
        self._folder.log(dataclasses.asdict(record))
        return record

    def _fingerprint(self) -> dict[str, object]:
        """What must not change between a checkpoint and the run that resumes from it."""
        return {
            "model": dataclasses.asdict(self.model),
            "config": dataclasses.asdict(self.config),
            "tokens": fingerprint.of_rows(self.corpus.train),
        }


def sample(
    params: Decoder, prompt: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Token ids of the prompt and ``num_tokens`` more; temperature 0 is greedy."""
    filled = lm.continue_text(params, *_sample_inputs(prompt, num_tokens, temperature, seed))
    return [int(token) for token in filled]


def _sample_inputs(prompt: list[int], num_tokens: int, temperature: float, seed: int) -> tuple:
    """Those of lm.continue_text; texts of one length share a program."""
    tokens = np.zeros(len(prompt) + num_tokens, np.int32)
    tokens[: len(prompt)] = prompt
    return tokens, len(prompt), temperature, jax.random.key(seed)
