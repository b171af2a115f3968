"""Training of a language model from scratch, and samples of its text."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.training import fingerprint
from jaxspec.training.data import Corpus
from jaxspec.training.held_out import HeldOut
from jaxspec.training.lm import model as lm
from jaxspec.training.lm.model import TrainConfig
from jaxspec.training.run import Program, Record, TrainingRun
from jaxspec.training.run_folder import batch_shardings
from jaxspec.training.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class LMRecord(Record):
    """One line of the training log. Losses are in nats per token."""

    loss: float | None = None  # None: nothing trained since the last record
    held_out_loss: float | None = None
    bits_per_byte: float | None = None


class Pretraining(TrainingRun[LMRecord]):
    """A training run in the folder ``directory``: checkpoints, and log.jsonl of LMRecords.

    Batches are split over the first ``data_parallel`` devices.

    Args:
      sample_length: tokens, prompt included, of the texts that ``sample`` will write while this
        runs: their program is compiled beside the others. 0: none.
    """

    record_type = LMRecord

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
        replicated, self._batch_sharding = batch_shardings(config.batch_size, data_parallel)
        windows = lm.held_out_windows(corpus.held_out, config, schedule.evaluation_tokens)
        # Each is [1, B, T + 1], so that one program runs them all and time is checked between them.
        batches = [jax.device_put(batch[None], replicated) for batch in windows]
        self._held_out = HeldOut(batches, schedule)
        self._tokens = jax.device_put(corpus.train, replicated)
        self.state = jax.device_put(lm.init_state(model, config), replicated)
        self._sample_length, self.decay_fraction = sample_length, config.decay_fraction
        self.tokens_per_step = config.batch_size * config.context
        identity = {
            "model": dataclasses.asdict(model),
            "config": dataclasses.asdict(config),
            "tokens": fingerprint.of_rows(corpus.train),
        }
        self.open(directory, identity, resume)

    @property
    def params(self) -> Decoder:
        """The weights so far, float32."""
        return self.state.params

    def programs(self) -> list[Program]:
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
        return programs

    def train(self, count: int) -> dict[str, float]:
        self.state, metrics = lm.train_steps(
            self.state, self._tokens, count, self.total_steps, self.config, self._batch_sharding
        )
        return {name: float(value) for name, value in metrics.items()}  # waits

    def evaluate(self) -> dict[str, float]:
        losses = self._held_out.evaluate(lambda batch: lm.evaluate(self.params, batch, self.config))
        loss, report = float(np.mean(losses)), self.corpus.report
        bits = loss / math.log(2) * report.held_out_tokens / report.held_out_bytes
        return {"held_out_loss": loss, "bits_per_byte": bits}


def sample(
    params: Decoder, prompt: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Token ids of the prompt and ``num_tokens`` more; temperature 0 is greedy."""
    filled = lm.continue_text(params, *_sample_inputs(prompt, num_tokens, temperature, seed))
    return [int(token) for token in filled]


def _sample_inputs(prompt: list[int], num_tokens: int, temperature: float, seed: int) -> tuple:
    """The inputs of lm.continue_text; texts of one length share a program."""
    tokens = np.zeros(len(prompt) + num_tokens, np.int32)
    tokens[: len(prompt)] = prompt
    return tokens, len(prompt), temperature, jax.random.key(seed)
