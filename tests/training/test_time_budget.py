"""--minutes holds on slow devices too, and progress is shown from the start."""

import io
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxspec.engine import memory
from jaxspec.training import data, held_out, progress, schedule
from jaxspec.training import run as training_run
from jaxspec.training.data import Corpus
from jaxspec.training.held_out import HeldOut
from jaxspec.training.lm import model as lm
from jaxspec.training.lm.model import TrainConfig
from jaxspec.training.lm.run import LMRecord, Pretraining
from jaxspec.training.progress import counting, follow, progress_bar
from jaxspec.training.schedule import EVALUATION_SHARE, SLACK, UNKNOWN_STEPS, Pace, Schedule
from tests.training.tiny_lm import tiny_lm

CONFIG = TrainConfig(batch_size=2, context=16, warmup_steps=4, compute_dtype="float32")
STEP_SECONDS, EVALUATION_SECONDS = 25.0, 8.0  # as two CPU cores take by default
BUDGET = 85.0


class Clock:
    """Replaces the module time: the clock advances only when a test adds to ``now``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        module = types.SimpleNamespace(monotonic=lambda: self.now)
        for user in (schedule, held_out, training_run, progress):
            monkeypatch.setattr(user, "time", module)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def corpus(sources: Path, tmp_path: Path) -> Corpus:
    return data.build_corpus([sources], tmp_path / "cache", 260)


def test_a_slow_device_holds_the_budget(
    corpus: Corpus, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    train_steps, evaluate = lm.train_steps, lm.evaluate

    class SlowSteps:
        lower = staticmethod(train_steps.lower)

        def __call__(self, state: Any, tokens: Any, count: int, *rest: Any) -> Any:
            calls.append(count)
            clock.now += count * STEP_SECONDS
            return train_steps(state, tokens, count, *rest)

    class SlowEvaluation:
        lower = staticmethod(evaluate.lower)

        def __call__(self, *arguments: Any) -> Any:
            clock.now += EVALUATION_SECONDS
            return evaluate(*arguments)

    monkeypatch.setattr(lm, "train_steps", SlowSteps())
    monkeypatch.setattr(lm, "evaluate", SlowEvaluation())
    run = Pretraining(tiny_lm(corpus), CONFIG, corpus, Schedule(deadline=BUDGET), tmp_path)
    records = list(run.run())
    assert calls == [1, 1], "one step, to see how long it takes, and one more"
    assert clock.now == 2 * (EVALUATION_SECONDS + STEP_SECONDS) <= BUDGET
    assert [record.step for record in records] == [0, 1, 2]
    assert records[-1].saved and records[-1].held_out_loss is not None


@pytest.mark.parametrize(
    ("sample", "free", "message"),
    [
        (0, 1000, r"a training step needs 0.00 GB, .* smaller batch or con"),
        # A step takes under 1 MB, the sample of 1,000 tokens 17: it is not blamed on the batch.
        (1000, 4 << 20, r"a sample needs 0.0. GB, .* free: give a shorter prompt"),
    ],
)
def test_what_is_beyond_the_memory_is_an_error_before_it_runs(
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sample: int,
    free: int,
    message: str,
):
    model, schedule = tiny_lm(corpus), Schedule(steps=1)
    run = Pretraining(model, CONFIG, corpus, schedule, tmp_path, sample_length=sample)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    with pytest.raises(ValueError, match=message):
        next(run.run())


def test_a_call_takes_as_many_steps_as_were_measured_to_fit():
    pace = Pace(Schedule(steps=1000, steps_per_call=20, evaluate_every=50), 0.5)
    assert pace.steps_of_call(0, 1000) == 1
    pace.ended(1, 0.5)
    assert pace.steps_of_call(1, 1000) == 4, "two seconds"
    pace.ended(4, 0.04)
    assert pace.steps_of_call(5, 1000) == 20
    assert pace.steps_of_call(45, 1000) == 5, "up to the evaluation"
    pace.ended(20, 500.0)
    assert pace.steps_of_call(50, 1000) == 1


def test_a_time_budget_sets_the_steps(clock: Clock):
    pace = Pace(Schedule(deadline=1100.0), decay_fraction=0.5)

    def total_after(now: float, step: int, total: int) -> int:
        clock.now = now
        return pace.total_steps(step, total)

    clock.now = 100.0
    pace.begins(10)
    # 10 steps took 10 s and 990 s are left; then 490 took 500 s and 500 s are left.
    assert total_after(110, 20, UNKNOWN_STEPS) == 20 + int(990 / (SLACK * 10 / 10))
    assert total_after(600, 500, 1010) == 500 + int(500 / (SLACK * 500 / 490))
    pace.saved(100.0)  # which is done again at the end
    assert total_after(600, 500, 1010) == 500 + int(400 / (SLACK * 500 / 490))
    pace.ended(100, 100.0)
    assert total_after(700, 600, 990) == 990, "the rate falls already"
    pace.ended(1, 301.0)
    assert total_after(700, 600, 990) == 600, "the next step would end too late"
    assert total_after(2000, 800, 990) == 800, "out of time"


@pytest.mark.parametrize("slow_steps", [[40.0], [120.0], [20.0] * 6])
def test_slow_first_steps_do_not_end_training_early(clock: Clock, slow_steps: list[float]):
    """As on a GPU that other programs fill; the steps after them take 0.1 seconds."""
    pace = Pace(Schedule(deadline=300.0), decay_fraction=0.5)
    clock.now, step, total = 0.0, 0, UNKNOWN_STEPS
    pace.begins(0)
    remaining = list(slow_steps)
    while step < total:
        steps = 1 if remaining else min(10, total - step)
        seconds = remaining.pop(0) if remaining else 0.1 * steps
        step, clock.now = step + steps, clock.now + seconds
        pace.ended(steps, seconds)
        total = pace.total_steps(step, total)
    assert 240 < clock.now < 300


def test_a_run_that_is_resumed_while_the_rate_falls_keeps_its_total(clock: Clock):
    pace = Pace(Schedule(deadline=300.0), decay_fraction=0.5)
    clock.now = 0.0
    pace.begins(600)
    clock.now = 1.0
    pace.ended(1, 0.1)  # 40 seconds are enough
    assert pace.total_steps(601, 1000) == 1000


def test_an_evaluation_takes_a_share_of_the_time_and_later_ones_take_the_same_batches(
    clock: Clock,
):
    def seconds_of(own: HeldOut[int], seconds: float) -> list[int]:
        def run(batch: int) -> Any:
            clock.now += seconds
            return jnp.int32(batch)

        return [int(value) for value in own.evaluate(run)]

    batches = list(range(100, 140))
    everything = seconds_of(HeldOut(batches, Schedule(steps=1)), 5.0)
    assert sorted(everything) == batches != everything
    clock.now, share = 0.0, EVALUATION_SHARE * 1000.0
    own = HeldOut(batches, Schedule(deadline=1000.0))
    found = seconds_of(own, 5.0)
    assert found == everything[: int(share / 5)] == own.batches
    assert seconds_of(own, 100.0) == found
    clock.now = 0.0
    assert seconds_of(HeldOut(batches, Schedule(deadline=1.0)), 5.0) == everything[:1]


def record(step: int, held_out_loss: float | None = None) -> LMRecord:
    return LMRecord(step, 9, 0, 0.0, held_out_loss=held_out_loss)


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_being_done_is_shown_from_the_start(clock: Clock, terminal: bool):
    def run(note: Any) -> Iterator[LMRecord]:
        note("compiling the training step")
        clock.now += 30
        yield record(0, 5.0)
        for step in range(1, 5):
            clock.now += 6
            yield record(step)

    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=80, highlight=False)
    assert len(list(follow(run, lambda one: f"step {one.step}", console, 0.0))) == 5
    text = output.getvalue()
    assert "30.0 s  step 0" in text
    for line in ("0.0 s  compiling the training step", "42.0 s  step 2", "54.0 s  step 4"):
        assert (line in text) == (not terminal)
    assert "36.0 s  step 1" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_counted_is_shown_from_the_start(clock: Clock, terminal: bool):
    output = io.StringIO()
    with progress_bar(Console(file=output, force_terminal=terminal, width=80)) as shown:
        show = counting(shown, "answers")
        for done in range(5):
            show(done, 9)
            clock.now += 6
    lines = [line for line in output.getvalue().splitlines() if line.startswith("answers")]
    assert terminal or lines[:3] == ["answers 0/9", "answers 2/9", "answers 4/9"]
    assert "answers 4/9" in output.getvalue()
