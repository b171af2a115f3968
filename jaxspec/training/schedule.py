"""When training stops, evaluates and saves."""

import dataclasses
import time

UNKNOWN_STEPS = 1 << 30  # total steps under a time budget, before any step has been timed
EVALUATION_SHARE = 0.05  # largest share of the remaining time budget for one evaluation
SLACK = 1.1  # reserve, so that the deadline does not cut off the end of the learning rate decay
# A total is too small if, at the last rate, its steps end within this share of the time that is
# left, and less than LATEST of the whole time has passed.
TOO_EARLY, LATEST = 0.5, 0.75


def deadline_of(started: float, minutes: float | None, share: float) -> float | None:
    """time.monotonic() when ``share`` of ``minutes`` has passed since ``started``; None if
    ``minutes`` is None."""
    return None if minutes is None else started + 60 * minutes * share


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When to stop, to evaluate and to save.

    Attributes:
      steps: total steps, or None to take as many as fit before ``deadline``.
      deadline: time.monotonic() by which training must end, or None.
      steps_per_call, seconds_per_call: limits of one call on the device, in steps and (about) in
        seconds. The first call takes one step.
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
        """Whether ``event`` (``evaluate_every`` or ``save_every``) is due after ``step`` steps."""
        return step % getattr(self, event) == 0 or step == total_steps

    def until_event(self, step: int, total_steps: int) -> int:
        """Steps up to the next evaluation, checkpoint or end."""
        events = self.evaluate_every, self.save_every
        return min(total_steps - step, *(event - step % event for event in events))


class Pace:
    """Total steps under a time budget, and steps of the next call, from measured step times.

    The total is estimated again until the learning rate begins to fall, and later if the steps that
    remain would end much too early: the first steps may have been many times as slow as these. The
    first call takes one step, as the time of a step is not known yet.
    """

    def __init__(self, schedule: Schedule, decay_fraction: float):
        self._schedule = schedule
        self._steady = 1 - decay_fraction
        self._first: tuple[int, float] | None = None  # step and time that the estimate counts from
        self._count, self._step_seconds = 1, 0.0
        self._last_save = 0.0

    def begins(self, step: int) -> None:
        """Training starts, or resumes, at ``step`` now; everything is compiled."""
        self._first = step, time.monotonic()

    def saved(self, seconds: float) -> None:
        """Record how long evaluating and saving took, to reserve that time at the end."""
        self._last_save = seconds

    def steps_of_call(self, step: int, total_steps: int) -> int:
        """Steps of the next call: as many as fit in ``seconds_per_call`` at the last rate."""
        return min(self._count, self._schedule.until_event(step, total_steps))

    def ended(self, steps: int, seconds: float) -> None:
        """Record that a call of ``steps`` steps took ``seconds``."""
        self._step_seconds = seconds / steps
        fitting = min(
            self._schedule.steps_per_call,
            self._schedule.seconds_per_call / max(self._step_seconds, 1e-9),
        )
        self._count = max(1, int(fitting))

    def total_steps(self, step: int, total: int) -> int:
        """A new estimate of the total, ``step`` steps being done now; at least ``step``."""
        if self._schedule.deadline is None:
            return total
        now, end = time.monotonic(), self._schedule.deadline - self._last_save
        if now + self._step_seconds > end:
            return step
        assert self._first is not None, "begins() was not called"
        first_step, first_time = self._first
        fall = self._steady * total
        too_early = (
            first_step < fall
            and (total - step) * self._step_seconds < TOO_EARLY * (end - now)
            and now - first_time < LATEST * (end - first_time)
        )
        if total != UNKNOWN_STEPS and step >= fall and not too_early:
            return total
        seconds_per_step = SLACK * (now - first_time) / (step - first_step)
        return step + int((end - now) / seconds_per_step)
