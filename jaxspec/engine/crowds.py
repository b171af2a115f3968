"""When the drafter is left out, since drafting cannot pay for so many rows: see Limits."""

import dataclasses
from collections.abc import Sequence

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.engine.plans.sequences import kind_of
from jaxspec.engine.programs.compiled import is_smaller
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Load, ReadKey, RoundsKey, compiles_alone
from jaxspec.scheduling import sequence as scheduling
from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.round_costs import Costs
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.tree_policy import LOST_SECONDS, WORTH_COMPILING, TreePolicy

SURELY = 2.0  # times that what reading again costs must be saved: how long texts are is a guess
MANY = 64  # rows of which a round takes as long as to read so many tokens of prompts
Place = tuple[int, scheduling.Sequence]  # with the row that it has, or will have


class Crowds:
    """Decides for each plan whether the drafter is left out.

    In a crowd it is. Once that is gone, those that still run are unread, and drafting for them
    begins with reading them again, from the start: if that is expected to pay, or if others come,
    which would be unread too. Until then plain decoding goes on. So it does for new requests as
    long as the programs that draft are not there: they are compiled as soon as it is worth it.
    """

    def __init__(self, programs: Programs, limits: Limits):
        self.programs, self.limits = programs, limits
        self._gain = 0.0  # share of the time that drafting may save of the last plan
        self._lost = 0.0  # seconds that it would have saved so far

    def observe(self, seconds: float) -> None:
        """The rounds of a plan without the drafter took so long."""
        self._lost += self._gain * seconds

    def is_crowd(self, rows: int) -> bool:
        """Whether the drafter is left out for so many rows, whatever they ask for."""
        crowd = self.limits.undrafted_rows
        return crowd is not None and min(rows, self.limits.num_rows) >= crowd

    def leave_drafter_out(
        self, scheduler: Scheduler, load: Load, policy: TreePolicy, costs: Costs
    ) -> bool:
        """Whether the next plan does without the drafter."""
        crowd = self.limits.undrafted_rows
        if crowd is None:
            return False
        rows = min(scheduler.num_running + scheduler.num_waiting, self.limits.num_rows)
        if rows >= crowd:
            self._gain = 0.0
            return True
        running, waiting = scheduler.running, scheduler.waiting
        places = [(each.row, each) for each in running if each.is_unread]
        if not running:
            places = list(enumerate(waiting))
        if not places:
            return False
        if running and rows > crowd // 2:  # it might be a crowd again soon
            return True
        size = self.programs.sizes.size_for([row for row, _ in places])
        shape, self._gain = policy.expect([each.request_id for _, each in places], costs, size)
        if running and not waiting and not self._pays(places, costs, size):
            return True
        return not self._should_draft(places, load, shape)

    def _pays(self, unread: Sequence[Place], costs: Costs, size: int) -> bool:
        """Whether drafting is expected to save more than it costs to read these rows again, in
        programs of so many rows."""
        left = max(_rounds_left(sequence) for _, sequence in unread)
        saved = self._gain * costs.seconds(size, PLAIN) * left
        tokens = sum(len(sequence.tokens) for _, sequence in unread)
        return saved > SURELY * tokens * costs.seconds(MANY, PLAIN) / MANY

    def _should_draft(self, places: Sequence[Place], load: Load, shape: TreeShape) -> bool:
        """Whether the programs that draft for these are there, or must be waited for since no
        others are. Else the compiler begins with them if it is worth it, and with what serves
        meanwhile first."""
        programs, sequences = self.programs, [sequence for _, sequence in places]
        drafting = self._keys(places, dataclasses.replace(load, undrafted=False), shape)
        missing = [key for key in drafting if programs.stand_in(key) is None]
        if not missing:
            return True
        is_new = not all(each.has_row for each in sequences)
        if not all(map(compiles_alone, missing)):  # they are compiled when they run
            return is_new
        undrafted = self._keys(places, dataclasses.replace(load, undrafted=True), PLAIN)
        serving = [programs.stand_in(key) for key in undrafted]
        if is_new and (programs.ask is None or None in serving):
            return True
        pairs = zip(undrafted, serving, strict=True)
        exact = all(found is not None and not is_smaller(key, found) for key, found in pairs)
        least = WORTH_COMPILING / (1 + WORTH_COMPILING)
        if exact and (self._gain > least or self._lost > LOST_SECONDS):
            for key in missing:
                programs.ask_for(key, serving)
        return False

    def _keys(
        self, places: Sequence[Place], load: Load, shape: TreeShape
    ) -> list[ReadKey | RoundsKey]:
        """The programs that read these rows from the start and decode them."""
        programs, sequences = self.programs, [sequence for _, sequence in places]
        tokens, most = max(each.limit for each in sequences), programs.sizes.max_chunk
        rounds = programs.rounds_key(
            [row for row, _ in places],
            tokens,
            load,
            shape,
            kind_of(sequences),
            rounds=programs.sizes.fixed_rounds,
        )
        reads = [(row, min(len(each.tokens), most), each.limit) for row, each in places]
        kind = kind_of(sequences, reads=True)
        return [*(key for key, _ in programs.readings(reads, load, set(), kind)), rounds]


def _rounds_left(sequence: scheduling.Sequence) -> int:
    """The rounds that a plain text has before it, which is expected to become twice as long."""
    written = len(sequence.tokens) - sequence.prompt_length
    return min(written, sequence.limit - len(sequence.tokens))
