"""Carries out the scheduler's plans: launches programs, and reads what they emitted."""

import time
from typing import NamedTuple

import numpy as np

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.state import ERRORS, Ending, Status
from jaxspec.engine.emitted import RowOutput, row_outputs
from jaxspec.engine.generation import Generation
from jaxspec.engine.host_drafter import HostDrafter
from jaxspec.engine.plans.host_copies import RowSnapshots, SwappedRows
from jaxspec.engine.plans.host_drafts import HostDrafts
from jaxspec.engine.plans.past_outputs import PastOutputs
from jaxspec.engine.plans.sequences import generation_of, kind_of, reads_of
from jaxspec.engine.plans.structured_rounds import StructuredRounds
from jaxspec.engine.plans.timer import PlanTimer
from jaxspec.engine.plans.wait_for_device import wait_for_device
from jaxspec.engine.programs.arguments import NewRow
from jaxspec.engine.programs.call import LaunchedCall, joined
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Kind, Load
from jaxspec.engine.programs.verifying import Verification, verify
from jaxspec.scheduling.plan import Plan, RowResult
from jaxspec.scheduling.preemption_costs import PreemptionCosts
from jaxspec.scheduling.sequence import Sequence

type Tokens = tuple[int, ...]


class Launched(NamedTuple):
    """A plan whose calls run on the device, with trees of one shape."""

    plan: Plan
    calls: list[LaunchedCall]
    shape: TreeShape


class PlanRunner:
    """The arrays behind a scheduler's rows and pages. It has no opinion on what to do next.

    What reading and swapping take is added to ``costs``.
    """

    def __init__(
        self, programs: Programs, costs: PreemptionCosts, host_drafter: HostDrafter | None = None
    ):
        self.programs = programs
        self.swapped = SwappedRows(programs, costs)
        self.snapshots = RowSnapshots(programs)
        self.past = PastOutputs(programs)
        self._timer = PlanTimer(programs, costs)
        self.structured = StructuredRounds(programs, HostDrafts(host_drafter))
        self._idle_rows = set(range(programs.sizes.num_rows))  # empty, or done, on the device

    def forget_texts(self) -> None:
        """Forget copies of states, and past outputs: other weights will run. All rows are empty."""
        self.snapshots = RowSnapshots(self.programs)
        self.past.forget()

    def ended(self, generation: Generation) -> None:
        """What a drafter may keep of a request that has ended, and what it may forget."""
        self.past.add(generation)
        self.structured.drafts.forget(generation.request_id)

    def launch(self, plan: Plan, load: Load, shape: TreeShape) -> list[LaunchedCall]:
        """Start everything that a plan says, in its order. Nothing is waited for."""
        programs = self.programs
        if plan.runs_model:
            self._timer.start(plan)
        self.swapped.finish_saving()
        self.snapshots.finish()
        for request_id in plan.dropped:
            self.swapped.drop(request_id)
        for out in plan.swap_out:
            self.swapped.save(out)
        programs.catch_up(plan.catch_up)
        programs.release([row for row in plan.release if row not in self._idle_rows])
        self._idle_rows |= set(plan.release)
        for back in plan.swap_in:
            self.swapped.restore(back)
            generation_of(back.sequence).preemptions = back.sequence.preemptions
        programs.copy_pages(plan.copies)
        for admission in plan.admissions:
            sequence = admission.sequence
            waited = time.perf_counter() - sequence.request.arrival
            generation_of(sequence).admitted(admission.cached, waited, sequence.preemptions)
        admitted = [self._new_row(new.sequence, new.cached) for new in plan.admissions]
        programs.admit(admitted)
        for admission in plan.admissions:
            if admission.snapshot is not None:
                self.snapshots.put(admission.snapshot, admission.sequence.row)
        restored = [self._new_row(back.sequence) for back in plan.swap_in]
        programs.set_controls([*restored, *admitted])
        self._idle_rows -= {new.row for new in (*restored, *admitted)}
        programs.resume([self._new_row(sequence) for sequence in plan.resumed])
        programs.assign_pages([(each.row, each.pages) for each in plan.tables])
        reads = self._reads(plan, load)
        verifies = self._verifies(plan, load)
        for step in plan.snapshots:
            self.snapshots.take(step)
        if plan.masked_rows:
            self.structured.draft(plan, reads, load, shape)
        return [*reads, *verifies, *self._rounds(plan, load, shape)]

    def _new_row(self, sequence: Sequence, cached: int = 0) -> NewRow:
        """What the device is told of a sequence, of which ``cached`` tokens need not be read."""
        generation = generation_of(sequence)
        return NewRow(
            row=sequence.row,
            prompt=(*sequence.tokens, *sequence.draft),
            max_len=sequence.limit,
            sampling=generation.sampling,
            stop_token_ids=self._stops(generation),
            request_prompt_len=sequence.prompt_length,
            table=tuple(sequence.pages),
            cached=cached,
        )

    def _stops(self, generation: Generation) -> tuple[int, ...]:
        """The tokens at which a request's row stops."""
        model = self.programs.params.target.config
        return (*generation.sampling.stops(model.stop_token_ids), *generation.pauses)

    def _reads(self, plan: Plan, load: Load) -> list[LaunchedCall]:
        if not plan.reads:
            return []
        sequences = [plan.sequences[read.row] for read in plan.reads]
        masks, reads = self.structured.first_masks(plan), reads_of(plan)
        kinds = {kind_of([sequence], reads=True) for sequence in sequences}
        if len(kinds) == 1 or self.programs.can_read(reads, load, set(masks), max(kinds)):
            return self.programs.read(reads, load, masks, kind=max(kinds))
        calls = []  # each in programs that are there, so that none waits for another's
        for kind in sorted(kinds):
            alike = [read for read in reads if self._reads_as(plan, read[0]) is kind]
            rows = {row for row, *_ in alike}
            parts = {row: mask for row, mask in masks.items() if row in rows}
            calls += self.programs.read(alike, load, parts, kind=kind)
        return calls

    def _reads_as(self, plan: Plan, row: int) -> Kind:
        return kind_of([plan.sequences[row]], reads=True)

    def _verifies(self, plan: Plan, load: Load) -> list[LaunchedCall]:
        if not plan.verifies:
            return []
        sequences = [plan.sequences[each.row] for each in plan.verifies]
        limits = [sequence.limit for sequence in sequences]
        parts = [
            Verification(each.row, each.count, each.given, limit)
            for each, limit in zip(plan.verifies, limits, strict=True)
        ]
        return [verify(self.programs, parts, load, kind_of(sequences))]

    def _rounds(self, plan: Plan, load: Load, shape: TreeShape) -> list[LaunchedCall]:
        if not plan.decode_rows:
            return []
        sequences = [plan.sequences[row] for row in plan.decode_rows]
        return self.programs.run_rounds(
            plan.decode_rows,
            max(sequence.limit for sequence in sequences),
            plan.rounds,
            load,
            shape=shape,
            kind=kind_of(sequences),
        )

    def wait(self, calls: list[LaunchedCall]) -> tuple[list[LaunchedCall], float | None]:
        """The calls of the earliest plan that has not been waited for, read from the device, and
        the seconds that its rounds took, if they are known."""
        found, waited = wait_for_device(calls)
        seconds = self._timer.stop(found, waited)
        return joined(found), seconds

    def results(self, launched: Launched) -> list[RowResult]:
        """What each row did in the calls of a plan, which were read from the device."""
        results: dict[int, RowResult] = {}
        for output in row_outputs(launched.calls, launched.plan.sequences):
            earlier = results.get(output.row)
            result = self._result(output, launched, earlier.tokens if earlier else ())
            results[output.row] = result if earlier is None else _after(earlier, result)
        self._idle_rows |= {row for row, result in results.items() if result.ended is not None}
        return list(results.values())

    def _result(self, output: RowOutput, launched: Launched, earlier: Tokens) -> RowResult:
        emitted, column = output.emitted, output.column
        ending, done = Ending(int(emitted.ending[column])), emitted.status[column] == Status.DONE
        tokens, pause = tuple(output.tokens), None
        if done and ending is Ending.STOP and not tokens:
            done = False  # an earlier call has ended it, or it pauses
        elif done and ending is Ending.STOP:
            ending, pause = self._at_stop(output, earlier)
            done = pause is None
        reads_on = emitted.num_rounds and not launched.plan.undrafted
        return RowResult(
            row=output.row,
            tokens=tokens,
            pending=self._pending(output.counts, launched.shape) if reads_on else 0,
            ended=ending.name if done else None,
            failed=bool(done) and ending in ERRORS,
            pause=pause,
            reads_on=bool(emitted.status[column] == Status.READING),
        )

    def _at_stop(self, output: RowOutput, earlier: Tokens) -> tuple[Ending, bool | None]:
        """Why a row has stopped, or, if it pauses, whether the host restricts its next tokens.

        ``earlier`` tokens of the same plan come before those of the output.
        """
        sequence, generation = output.sequence, generation_of(output.sequence)
        phases, new = generation.phases, [*earlier, *output.tokens]
        if phases is None or generation.done or new[-1] not in phases.pauses:
            return Ending.STOP, None
        phases.pass_pause([*sequence.tokens[sequence.prompt_length :], *new])
        if len(sequence.tokens) + len(new) >= sequence.limit:
            return Ending.LENGTH, None
        return Ending.NONE, phases.masked

    def _pending(self, counts: np.ndarray, shape: TreeShape) -> int:
        """Tokens of the context that the drafter has not read after rounds that committed
        ``counts``; it reads those of a round in the next one."""
        params = self.programs.params
        most = params.drafter.most_pending(params.speculation)
        ran = counts[counts > 0]
        if most is None or not len(ran):
            return 0
        if shape.is_plain:
            return most - 1  # at most: it reads them once in a while
        rejected = params.speculation.max_depth + 1 - int(ran[-1])
        return most - 1 - rejected


def _after(earlier: RowResult, later: RowResult) -> RowResult:
    """What a row did in two calls. A call that ran no round of it leaves its pending tokens, and
    why it was done before."""
    if not (later.tokens or later.ended):
        return earlier
    pending = later.pending if later.tokens else earlier.pending
    return later._replace(tokens=earlier.tokens + later.tokens, pending=pending)
