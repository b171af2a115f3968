"""Which request does what next. Owns all rows and pages; the engine owns the arrays."""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable

from jaxspec.config.cache import pages_for
from jaxspec.scheduling.pages import PageUsage, page_usage
from jaxspec.scheduling.plan import (
    Admission,
    Delivery,
    Flight,
    Limits,
    Plan,
    QueueFull,
    Read,
    RowResult,
    Snapshot,
    SwapIn,
    SwapOut,
)
from jaxspec.scheduling.preemption_costs import HostMemory, PreemptionCosts
from jaxspec.scheduling.rounds_per_call import CallRounds
from jaxspec.scheduling.rows_and_pages import Placement, Shard
from jaxspec.scheduling.sequence import DrafterRead, Request, Sequence, State
from jaxspec.scheduling.shares import ReadingShares


class Scheduler:
    """Plans calls for requests that come and go. All methods are called from one thread.

    The engine calls ``plan``, does what it says, and tells ``update`` what each plan that
    ``runs_model`` emitted, in the same order. It may make further plans before that: they are right
    whatever the calls in flight turn out to emit.

    Attributes:
      costs: what decides how a sequence is preempted; it may learn meanwhile.
      host: what is in host memory now.
      preemptions: how many sequences were preempted, by "recompute" and "swap".
      holds: whether only those get rows that have begun.
      undrafted: whether plans leave the drafter out. Who runs when it comes back is preempted.
    """

    def __init__(self, limits: Limits, costs: PreemptionCosts | None = None):
        self.limits, self.host = limits, HostMemory(limits)
        self.costs = PreemptionCosts() if costs is None else costs
        self.shards = tuple(Shard(index, limits) for index in range(limits.shards))
        self.preemptions = {"recompute": 0, "swap": 0}
        self.holds = self.undrafted = False
        self._sequences: dict[str, Sequence] = {}  # that have not ended
        self._waiting: list[Sequence] = []  # by queue_rank
        self._deferred: list[Sequence] = []  # passed over by the last plan, see num_deferred
        self._leaving: list[Sequence] = []  # ended, but their rows are not yet released
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self._dropped: list[str] = []  # to be told by the next plan
        self._in_flight: deque[Plan] = deque()
        self._num_added = self._num_planned = 0
        self._rounds, self._shares = CallRounds(limits), ReadingShares(limits)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that the last plan passed over, though a row was free: calls of theirs
        are in flight, or a running row computes KV that they can share."""
        return sum(sequence.state is State.WAITING for sequence in self._deferred)

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Those that hold a row, and have not ended."""
        return [s for shard in self.shards for s in shard.running if s.state is not State.ENDED]

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, no call is in flight, and no row is still to be released."""
        return not (self._sequences or self._leaving or self._in_flight or self._dropped)

    @property
    def begun(self) -> list[Sequence]:
        """Those that have begun and not ended."""
        return [sequence for sequence in self._sequences.values() if sequence.has_begun]

    @property
    def is_quiet(self) -> bool:
        """Whether no row is in use and no call in flight; requests may wait for a first row."""
        return not (self._leaving or self._in_flight or self._dropped or self.begun)

    def usage(self) -> PageUsage:
        """What the pages are used for. The whole prompt of a reading row counts as its tokens."""
        return page_usage((shard.tables() for shard in self.shards), self.limits.page_size)

    def cache_statistics(self) -> tuple[int, int]:
        """Prompt tokens that were looked up in the prefix cache, and those that were found.

        Each request counts once, when it first gets a row; one that shares a sibling's does not.
        """
        caches = [shard.cache for shard in self.shards]
        return sum(cache.queries for cache in caches), sum(cache.hits for cache in caches)

    def add(self, request: Request) -> None:
        """Queue a request that ``limits.check`` has let pass.

        Raises ValueError for one whose id is in use, and QueueFull.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is already here: give it another id")
        if self.limits.max_queue is not None and self.num_waiting >= self.limits.max_queue:
            raise QueueFull(f"{self.num_waiting} requests wait, max_queue={self.limits.max_queue}")
        self._queue(request)

    def _queue(self, request: Request) -> None:
        limit = self.limits.most_tokens(len(request.prompt), request.max_tokens)
        sequence = Sequence(request, self._num_added, limit, list(request.prompt))
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        self._enqueue(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.order, sequence))

    def cancel(self, request_id: str) -> None:
        """End a request, whatever it is doing. Does nothing if it has ended."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._end(sequence)

    def send_back(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Let a request without calls in flight wait for its first row again, with this draft."""
        sequence.needs_drafter_catch_up = False
        self._end(sequence)
        self._queue(sequence.request.with_draft(draft))

    def forget_prefixes(self) -> None:
        """Find no page of what was read so far, once it ``is_quiet``."""
        self.shards = tuple(Shard(index, self.limits) for index in range(self.limits.shards))

    def plan(self, now: float, most_rounds: int | None = None, *, reads_only: bool = False) -> Plan:
        """What the device does next. Without any step if it can only wait.

        Args:
          most_rounds: of the plan's call, if fewer than the limits allow.
          reads_only: no row decodes in a plan that reads prompts.
        """
        plan = Plan(self._num_planned, undrafted=self.undrafted)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.ENDED:
                self._end(sequence)
                plan.timed_out.append(sequence.request_id)
        self._deferred = []
        self._release_ended(plan)
        self._choose_what_drafter_reads(plan)
        if self._keep_decoding(plan):  # nobody comes in while others must go
            self._admit(plan)
        self._read(plan)
        if not (reads_only and plan.reads):
            self._decode(plan, most_rounds or self.limits.max_rounds)
        return self._launch(plan)

    def update(self, plan: Plan, results: Iterable[RowResult]) -> list[Delivery]:
        """Take in what a plan's calls emitted; rows that are not named emitted nothing.

        Returns what requests get that have not ended in the meantime.

        Raises ValueError for a plan that is not the next one, or results that it cannot have.
        """
        by_row = {result.row: result for result in results}
        deliveries = []
        for row, flight in self._take_flights(plan, by_row.values()).items():
            result, sequence = by_row.get(row, RowResult(row)), flight.sequence
            flight.land()
            if sequence.state is State.ENDED or flight.stood_still(result):
                continue
            self._advance(flight, result)
            if flight.verifies and not result.ended:
                sequence.verified(len(result.tokens), reads_on=result.reads_on)
            if result.pause is not None:
                sequence.pause(masked=result.pause)
            if not result.ended and flight.least:
                self._rounds.observe(len(result.tokens), flight.least)
            if result.tokens or result.ended:
                deliveries.append(Delivery(sequence.request_id, result.tokens, result.ended))
        return deliveries

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        insort(self._waiting, sequence, key=lambda other: other.queue_rank)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        if sequence.swapped:
            self.host.give_back(sequence)
            self._dropped.append(sequence.request_id)
        if sequence.has_row:
            self._leaving.append(sequence)
        sequence.state = State.ENDED

    def _shard_of(self, row: int) -> Shard:
        return self.shards[row * self.limits.shards // self.limits.num_rows]

    # The steps of a plan.

    def _release_ended(self, plan: Plan) -> None:
        for sequence in self._leaving:
            shard = self._shard_of(sequence.row)
            if sequence.needs_drafter_catch_up:
                plan.catch_up.append(sequence.row)
                sequence.num_complete_tokens = len(sequence.tokens) - 1
                shard.register(sequence)
            plan.release.append(sequence.row)
            shard.leave(sequence)
        self._leaving.clear()

    def _choose_what_drafter_reads(self, plan: Plan) -> None:
        """The drafter reads nothing more of the rows that run, or all from the start."""
        for sequence in self.running:
            if plan.undrafted:
                sequence.leave_drafter_out()
            elif sequence.is_unread:
                self._preempt(sequence, self._shard_of(sequence.row), plan)

    def _keep_decoding(self, plan: Plan) -> bool:
        """Give every decoding row the pages of one round; the worst rows go where they lack.

        Returns whether nobody had to go.
        """
        before = sum(self.preemptions.values())
        for shard in self.shards:
            for sequence in sorted(shard.running, key=lambda other: other.rank):
                if sequence.state is not State.DECODING or sequence.is_surely_done:
                    continue
                while sequence.has_row and not shard.grow(sequence, 1):
                    self._preempt(max(shard.running, key=lambda other: other.rank), shard, plan)
        return sum(self.preemptions.values()) == before

    def _preempt(self, sequence: Sequence, shard: Shard, plan: Plan) -> None:
        """Take a sequence's row and pages, to go on later."""
        context = sequence.most_context
        num_pages = pages_for(context, self.limits.page_size)
        is_swapped = sequence.may_be_swapped and self.host.is_better(context, num_pages, self.costs)
        if is_swapped:
            pages = tuple(sequence.pages[:num_pages])
            plan.swap_out.append(SwapOut(sequence.row, sequence, pages))
            self.host.take(sequence, num_pages)
        plan.release.append(sequence.row)
        shard.leave(sequence)
        self.preemptions["swap" if is_swapped else "recompute"] += 1
        sequence.preemptions += 1
        self._enqueue(sequence)

    def _admit(self, plan: Plan) -> None:
        """Give free rows to those who wait, in order.

        One that lacks pages blocks those behind it. One that waits for calls in flight, or for KV
        that a running row is computing, does not.
        """
        waiting = [s for s in self._waiting if s.has_begun] if self.holds else self._waiting
        for sequence in waiting[: 2 * self.limits.num_rows]:
            shards = [shard for shard in self.shards if shard.free_rows]
            if not shards:
                return
            sequence.expect_drafter(not plan.undrafted)
            placements = [shard.placement(sequence) for shard in shards]
            ready = [p for p in placements if not p.shard.should_wait(p, sequence)]
            if sequence.flights or not ready:
                self._deferred.append(sequence)
                continue
            fitting = [p for p in ready if p.shard.fits(p, sequence)]
            if not fitting or not self.host.can_swap_all(self.running, self._waiting, sequence):
                return
            best = max(fitting, key=lambda p: (p.cached, p.shard.pages.available))
            self._place(best, sequence, plan)

    def _place(self, placement: Placement, sequence: Sequence, plan: Plan) -> None:
        copy = placement.shard.place(placement, sequence)
        self._waiting.remove(sequence)
        if sequence.swapped:
            sequence.state = State.DECODING
            if plan.undrafted:
                sequence.leave_drafter_out()
            self.host.give_back(sequence)
            context = len(sequence.tokens) - 1
            plan.swap_in.append(SwapIn(sequence, pages_for(context, self.limits.page_size)))
            return
        if copy is not None:
            plan.copies.append(copy)
        if placement.source is None and sequence.preemptions == 0:
            placement.shard.cache.count(len(sequence.tokens), placement.cached)
        sequence.state, sequence.paused = State.READING, False
        sequence.goal = len(sequence.tokens)
        sequence.num_complete_tokens, sequence.needs_drafter_catch_up = placement.cached, False
        sequence.read = max(0, placement.cached - self.limits.prefix_tokens_read_again)
        sequence.branch = placement.known if placement.known > placement.cached else 0
        snapshot = placement.shard.snapshot_for(placement)
        plan.admissions.append(Admission(sequence, placement.cached, snapshot))

    def _read(self, plan: Plan) -> None:
        """Share the budget among the rows that read; who finishes decodes in this very plan."""
        plan.add_verifies([shard.running for shard in self.shards], self.limits)
        readers = sorted(
            (s for s in self.running if s.state is State.READING and s.left_to_read),
            key=lambda reader: reader.order,
        )
        counts = self._shares.choose([sequence.left_to_read for sequence in readers])
        for sequence, most in zip(readers, counts, strict=True):
            if not most:
                continue
            shard = self._shard_of(sequence.row)
            count = shard.read_end(sequence, most) - sequence.read
            plan.reads.append(Read(sequence.row, count))
            sequence.read += count
            slot = shard.snapshot(sequence)
            if slot is not None:
                plan.snapshots.append(Snapshot(sequence.row, slot))
            is_read = sequence.read == sequence.goal
            if is_read:
                sequence.state = State.DECODING
            plan.add_flight(sequence, int(is_read), int(is_read))

    def _decode(self, plan: Plan, most_rounds: int) -> None:
        """Let all rows decode for as many rounds as the load and the pages allow.

        Where all of them end their prompts in this plan, they decode in the next one, which is
        launched before this one's results are read: so first tokens wait for no round.
        """
        groups = [
            [s for s in shard.running if s.state is State.DECODING and not s.is_surely_done]
            for shard in self.shards
        ]
        if not any(groups):
            return
        reading = {read.row for read in (*plan.reads, *plan.verifies)}
        running = [sequence for group in groups for sequence in group]
        waits = bool(self._waiting)
        rounds = self._rounds.choose(running, most_rounds, reads=bool(reading), waits=waits)
        if all(sequence.row in reading for sequence in running):
            return
        while rounds > 1 and any(
            shard.lacks(group, rounds) for shard, group in zip(self.shards, groups, strict=True)
        ):
            rounds //= 2
        plan.rounds = rounds
        for shard, group in zip(self.shards, groups, strict=True):
            for sequence in group:
                rounds = 1 if sequence.masked else plan.rounds
                has_grown = shard.grow(sequence, rounds)
                assert has_grown, "pages for one round were reserved, those for more were counted"
                rows = plan.masked_rows if sequence.masked else plan.decode_rows
                rows.append(sequence.row)
                plan.add_flight(sequence, rounds, rounds * self.limits.tokens_per_round)

    def _launch(self, plan: Plan) -> Plan:
        """The finished plan. Its calls are in flight from now on."""
        for step in (*plan.swap_in, *plan.admissions):  # they tell the device of the pages
            step.sequence.table_changed = False
        plan.resumed = [sequence for sequence in self.running if sequence.paused]
        plan.tables = [sequence for sequence in self.running if sequence.table_changed]
        for sequence in self.running:
            sequence.paused = sequence.table_changed = False
        plan.dropped, self._dropped = self._dropped, []
        self._num_planned += 1
        if plan.runs_model:
            self._in_flight.append(plan)
        return plan

    # What came out of it.

    def _take_flights(self, plan: Plan, results: Iterable[RowResult]) -> dict[int, Flight]:
        """The flights of the earliest plan whose results are not known yet."""
        index = self._in_flight[0].index if self._in_flight else None
        if index != plan.index:
            raise ValueError(f"plan {plan.index} is updated, but the next one is {index}")
        plan.check(results)
        return self._in_flight.popleft().flights

    def _advance(self, flight: Flight, result: RowResult) -> None:
        """Add a row's new tokens, and make the pages known that they complete."""
        sequence = flight.sequence
        sequence.tokens += result.tokens
        context = len(sequence.tokens) - 1 if len(sequence.tokens) > sequence.goal else flight.read
        if result.failed:
            sequence.needs_drafter_catch_up = False
        elif sequence.has_row and sequence.drafter_read is not DrafterRead.PART:  # nor preempted
            self._shard_of(sequence.row).complete(sequence, context, result.pending)
        if result.ended:
            self._end(sequence)
