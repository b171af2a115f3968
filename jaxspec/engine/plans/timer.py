"""Learns what reading costs from the plans of a running engine: see PreemptionCosts."""

import collections
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.programs import Programs
from jaxspec.scheduling.plan import Plan
from jaxspec.scheduling.preemption_costs import PreemptionCosts


class _Started(NamedTuple):
    """A plan whose calls run.

    Attributes:
      tokens: that it reads, of prompts or old texts.
      plain: it does nothing but read and run rounds that the host does not restrict.
      compiled: programs that were compiled before its launch.
      at: seconds, by time.perf_counter.
    """

    tokens: int
    plain: bool
    compiled: int
    at: float


class PlanTimer:
    """Times the calls of plans, which are launched and waited for in the same order."""

    def __init__(self, programs: Programs, costs: PreemptionCosts):
        self.programs, self.costs = programs, costs
        self._started: collections.deque[_Started] = collections.deque()
        self._free = 0.0  # when the device had finished the plan before

    def start(self, plan: Plan) -> None:
        """A plan with calls is about to be launched."""
        others = plan.swap_out, plan.swap_in, plan.catch_up, plan.masked_rows, plan.verifies
        plain = not any(others)
        tokens = sum(read.count for read in (*plan.reads, *plan.verifies))
        started = _Started(tokens, plain, self.programs.compiled, time.perf_counter())
        self._started.append(started)

    def stop(self, calls: Sequence[LaunchedCall], waited: bool) -> float | None:
        """The calls of the earliest plan that was started were read: the seconds that its rounds
        took, if it did nothing else.

        Its time is known if the host had to wait for it, and nothing was compiled meanwhile.
        """
        now, started, seconds = time.perf_counter(), self._started.popleft(), None
        alone = started.compiled == self.programs.compiled and not self.programs.compiles_now
        if waited and started.plain and alone:
            rounds = sum(int(call.emitted.num_rounds) for call in calls)
            taken = now - max(started.at, self._free)
            self.costs.add_call(started.tokens, rounds, taken)
            seconds = None if started.tokens else taken
        self._free = now
        return seconds
