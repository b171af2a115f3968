"""When the drafter is left out, since drafting cannot pay for so many rows: see Limits."""

import dataclasses
from collections.abc import Sequence

from jaxspec.config.speculation import PLAIN
from jaxspec.engine.plans.sequences import kind_of
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Load, ReadKey, RoundsKey
from jaxspec.scheduling import sequence as scheduling
from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.round_costs import Costs
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.tree_policy import TreePolicy

SURELY = 2.0  # times that what reading again costs must be saved: how long texts are is a guess
MANY = 64  # rows of which a round takes as long as to read so many tokens of prompts


class Crowds:
    """Decides for each plan whether the drafter is left out.

    In a crowd it is. Once that is gone, those that still run are unread, and drafting for them
    begins with reading them again, from the start: if that is expected to pay, or if others come,
    which would be unread too. Until then plain decoding goes on.
    """

    def __init__(self, programs: Programs, limits: Limits):
        self.programs, self.limits = programs, limits

    def leave_drafter_out(
        self, scheduler: Scheduler, load: Load, policy: TreePolicy, costs: Costs
    ) -> bool:
        """Whether the next plan does without the drafter."""
        crowd = self.limits.undrafted_rows
        if crowd is None:
            return False
        rows = min(scheduler.num_running + scheduler.num_waiting, self.limits.num_rows)
        unread = [each for each in scheduler.running if each.is_unread]
        if rows >= crowd or not unread:
            return rows >= crowd
        if rows > crowd // 2:  # it might be a crowd again soon
            return True
        size = self.programs.sizes.size_for([each.row for each in unread])
        shape, share = policy.expect([each.request_id for each in unread], costs, size)
        saved = share * costs.seconds(size, PLAIN) * max(map(_rounds_left, unread))
        tokens = sum(len(each.tokens) for each in unread)
        pays = saved > SURELY * tokens * costs.seconds(MANY, PLAIN) / MANY
        if not (pays or scheduler.num_waiting):
            return True
        load = dataclasses.replace(load, undrafted=False)
        rounds = self.programs.rounds_key(
            [each.row for each in unread],
            max(each.limit for each in unread),
            load,
            shape,
            kind_of(unread),
            rounds=self.programs.sizes.fixed_rounds,
        )
        return not self._are_ready(rounds, self._reading(unread, load))

    def _reading(self, unread: Sequence[scheduling.Sequence], load: Load) -> list[ReadKey]:
        """The programs that would read these rows again."""
        most = self.programs.sizes.max_chunk
        reads = [(each.row, min(len(each.tokens), most), each.limit) for each in unread]
        kind = kind_of(unread, reads=True)
        return [key for key, _ in self.programs.readings(reads, load, set(), kind)]

    def _are_ready(self, rounds: RoundsKey, reads: Sequence[ReadKey]) -> bool:
        """Whether programs run without waiting for the compiler; else it begins, if it may."""
        missing: list[ReadKey | RoundsKey] = []
        missing += [key for key in reads if self.programs.stand_in(key) is None]
        missing += [rounds] if self.programs.stand_in(rounds) is None else []
        for key in missing:
            if self.programs.ask is not None:
                self.programs.ask(key)
        return not missing


def _rounds_left(sequence: scheduling.Sequence) -> int:
    """Of a plain text, which is expected to become twice as long as it is."""
    written = len(sequence.tokens) - sequence.prompt_length
    return min(written, sequence.limit - len(sequence.tokens))
