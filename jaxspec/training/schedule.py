"""When training stops, evaluates and saves."""

import dataclasses
import time

UNKNOWN_STEPS = 1 << 30  # total steps while a time budget has not been measured against yet
EVALUATION_SHARE = 0.05  # most of what is left of a time budget that one evaluation may take
SLACK = 1.1  # lest the deadline cuts off the end of the learning rate's fall


def deadline_of(started: float, minutes: float | None, share: float) -> float | None:
    """time.monotonic() when ``share`` of a budget of ``minutes`` since ``started`` is spent; None
    without a budget."""
    return None if minutes is None else started + 60 * minutes * share


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When to stop and what to do on the way.

    Attributes:
      steps: total steps, or None to take as many as fit before ``deadline``.
      deadline: time.monotonic() at which training must have ended, or None.
      steps_per_call, seconds_per_call: most steps that training goes on without a look at the
        results, and about the longest that it does so. The first time it is one step.
      evaluate_every, save_every: steps between evaluations and between checkpoints.
      evaluation_tokens: held-out tokens of one evaluation.
    """

    steps: int | None = None
    deadline: float | None = None
    steps_per_call: int = 20
    seconds_per_call: float = 2.0
    evaluate_every: int = 500
    save_every: int = 1000
    evaluation_tokens: int = 1 << 20

    def __post_init__(self):
        if (self.steps is None) == (self.deadline is None):
            raise ValueError("give either a number of steps or a time budget")
        counts = self.steps, self.steps_per_call, self.evaluate_every, self.save_every
        if min(count for count in counts if count is not None) < 1:
            raise ValueError("steps, and steps between events, must be at least 1")

    def is_due(self, event: str, step: int, total_steps: int) -> bool:
        """Whether ``evaluate_every`` or ``save_every`` asks for something after ``step`` steps."""
        return step % getattr(self, event) == 0 or step == total_steps

    def until_event(self, step: int, total_steps: int) -> int:
        """Steps up to the next evaluation, checkpoint or end."""
        events = self.evaluate_every, self.save_every
        return min(total_steps - step, *(event - step % event for event in events))


class Pace:
    """Total steps under a time budget, and steps of the next call, by what has been measured.

    The total is re-estimated until the learning rate begins to fall. The first call takes one step:
    nobody knows yet how long that is.
    """

    def __init__(self, schedule: Schedule, decay_fraction: float):
        self._schedule = schedule
        self._steady = 1 - decay_fraction
        self._first: tuple[int, float] | None = None  # step and time that the estimate counts from
        self._count, self._step_seconds = 1, 0.0
        self._last_save = 0.0

    def begins(self, step: int) -> None:
        """Training goes on from ``step`` now; everything is compiled."""
        self._first = step, time.monotonic()

    def saved(self, seconds: float) -> None:
        """Record how long evaluating and saving took, to keep that time back at the end."""
        self._last_save = seconds

    def steps_of_call(self, step: int, total_steps: int) -> int:
        """Steps of the next call: what was measured says how many take ``seconds_per_call``."""
        return min(self._count, self._schedule.until_event(step, total_steps))

    def ended(self, steps: int, seconds: float) -> None:
        """A call of so many steps took so long."""
        self._step_seconds = seconds / steps
        fitting = min(
            self._schedule.steps_per_call,
            self._schedule.seconds_per_call / max(self._step_seconds, 1e-9),
        )
        self._count = max(1, int(fitting))

    def total_steps(self, step: int, total: int) -> int:
        """The new total after ``step`` steps have ended now; never less than ``step``."""
        if self._schedule.deadline is None:
            return total
        now, end = time.monotonic(), self._schedule.deadline - self._last_save
        if now + self._step_seconds > end:
            return step
        if total != UNKNOWN_STEPS and step >= self._steady * total:
            return total
        assert self._first is not None, "begins() was not called"
        first_step, first_time = self._first
        seconds_per_step = SLACK * (now - first_time) / (step - first_step)
        return step + int((end - now) / seconds_per_step)
