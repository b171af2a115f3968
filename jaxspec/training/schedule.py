"""When training stops, evaluates and saves."""

import dataclasses
import time

UNKNOWN_STEPS = 1 << 30  # total steps while a time budget has not been measured against yet
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
        counts = self.steps, self.steps_per_call, self.evaluate_every, self.save_every
        if min(count for count in counts if count is not None) < 1:
            raise ValueError("steps, and steps between events, must be at least 1")

    def is_due(self, event: str, step: int, total_steps: int) -> bool:
        """Whether ``evaluate_every`` or ``save_every`` asks for something after ``step`` steps."""
        return step % getattr(self, event) == 0 or step == total_steps

    def steps_of_call(self, step: int, total_steps: int) -> int:
        """Steps up to the next evaluation, checkpoint or end, at most those of one call."""
        events = self.evaluate_every, self.save_every
        until_event = (event - step % event for event in events)
        return min(self.steps_per_call, total_steps - step, *until_event)


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
