"""A device without arrays: it does what plans say, and checks all that a plan promises.

Every slot of a page remembers which tokens its KV was computed from, for the target and for the
drafter. So wrong sharing, a lost copy or a page that is given out too early is seen at once.
"""

import collections
import dataclasses
import random
import zlib

from jaxspec.config.cache import pages_for
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import Limits, Plan, RowResult
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import Request, Sequence

STOP = 0
ENDLESS = "endless"  # as a request's payload: it never generates STOP
VOCABULARY = 40
POISON = "poison"
SCRATCH = "scratch"


def holders(allocator: PageAllocator, page: int) -> int:
    """Number of sequences that hold the page."""
    return allocator._holders[page]


def is_writable(allocator: PageAllocator, page: int) -> bool:
    """Whether the page has one holder, and the prefix cache does not know it."""
    return allocator._holders[page] == 1 and not allocator._kept[page]


def free_pages(allocator: PageAllocator) -> list[int]:
    """Pages without content."""
    return list(allocator._free)


def next_token(request: Request, tokens: list[int]) -> int:
    """The next token of a request: it depends on all tokens before."""
    token = zlib.crc32(f"{request.request_id} {tokens}".encode()) % VOCABULARY
    return token or (1 if request.payload == ENDLESS else STOP)


def text_alone(request: Request, max_length: int) -> tuple[list[int], str]:
    """What a request generates alone, and why it ends."""
    tokens, limit = list(request.prompt), min(len(request.prompt) + request.max_tokens, max_length)
    while len(tokens) < limit:
        tokens.append(next_token(request, tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt) :], "stop" if tokens[-1] == STOP else "length"


@dataclasses.dataclass
class Slot:
    """The KV of one token: the tokens (and namespace) that it was computed from."""

    target: object = None
    draft: object = None


def _copied(page: list[Slot]) -> list[Slot]:
    return [dataclasses.replace(slot) for slot in page]


@dataclasses.dataclass
class Row:
    sequence: Sequence
    tokens: list[int]
    goal: int
    cached: int
    context: int
    drafted: int  # tokens whose draft KV is written
    table: tuple[int, ...]
    draft: list[int]
    ended: str | None = None
    keys: list[int] = dataclasses.field(default_factory=list)

    def key(self, position: int) -> int:
        """What the KV of a position must have been computed from, as a hash."""
        while len(self.keys) <= position:
            before = self.keys[-1] if self.keys else self.sequence.namespace
            self.keys.append(hash((before, self.tokens[len(self.keys)])))
        return self.keys[position]


class FakeDevice:
    """Commits random numbers of tokens a round.

    Args:
      has_drafter: whether draft KV lags behind by the tokens of the last round.
    """

    def __init__(self, scheduler: Scheduler, seed: int = 0, has_drafter: bool = True):
        self.scheduler = scheduler
        self.limits: Limits = scheduler.limits
        self.has_drafter = has_drafter
        self.random = random.Random(seed)
        self.rows: dict[int, Row] = {}
        self.host: dict[str, tuple[Row, list[list[Slot]]]] = {}
        self.snapshots: dict[int, tuple[int, object]] = {}  # by slot: tokens, and their key
        self.pages = [
            [[Slot(POISON, POISON) for _ in range(self.limits.page_size)]
             for _ in range(self.limits.num_pages + 1)]
            for _ in range(self.limits.shards)
        ]  # fmt: skip

    def run(self, plan: Plan) -> list[RowResult]:
        """Do a plan's steps in order. Call it before anything else changes in the scheduler."""
        self._move(plan)
        self._change_tables(plan)
        self._check_ownership(plan)
        emitted: dict[int, list[int]] = {row: [] for row in plan.sequences}
        reads = [*plan.reads, *plan.verifies]
        assert sum(read.count for read in plan.reads) <= self.limits.prefill_budget
        assert all(verify.count <= self.limits.largest_verified for verify in plan.verifies)
        verified = collections.Counter(self._shard(verify.row) for verify in plan.verifies)
        assert all(rows <= self.limits.verified_rows for rows in verified.values())
        assert len({read.row for read in reads}) == len(reads)
        for read in plan.reads:
            emitted[read.row] += self._read(read.row, read.count, plan.undrafted)
        for verify in plan.verifies:
            emitted[verify.row] += self._verify(
                verify.row, verify.count, verify.given, plan.undrafted
            )
        for step in plan.snapshots:
            state = self.rows[step.row]
            assert state.ended is None and step.slot in range(self.limits.snapshots or 0)
            self.snapshots[step.slot] = self._recurrent(state)
        for row in plan.decode_rows:
            for _ in range(plan.rounds):
                emitted[row] += self._round(row, plan.undrafted)
        return [self._result(row, tokens, plan.undrafted) for row, tokens in emitted.items()]

    def _result(self, row: int, tokens: list[int], undrafted: bool) -> RowResult:
        state = self.rows[row]
        pending = 0 if undrafted else state.context - state.drafted
        reads_on = state.ended is None and state.context < state.goal
        return RowResult(row, tuple(tokens), pending, state.ended, reads_on=reads_on)

    # Steps before the calls.

    def _move(self, plan: Plan) -> None:
        for request_id in plan.dropped:
            del self.host[request_id]
        for out in plan.swap_out:
            state = self.rows[out.row]
            assert state.sequence is out.sequence
            # A page may be the prefix cache's equal of the one that the device still has.
            state.table = (*out.pages, *state.table[len(out.pages) :])
            self._check_context(out.row, state.context, state.drafted)
            assert len(out.pages) >= pages_for(state.context, self.limits.page_size)
            saved = [_copied(self._page(out.row, page)) for page in out.pages]
            self.host[out.sequence.request_id] = (state, saved)
        self._check_host_memory()
        for row in plan.catch_up:
            assert self.rows[row].drafted < self.rows[row].context
            assert not self.rows[row].sequence.is_unread
            self._draft(row)
        for row in plan.release:
            del self.rows[row]

    def _check_host_memory(self) -> None:
        size, most = self.limits.part_pages, self.limits.host_parts
        parts = sum(-(-len(saved) // size) for _, saved in self.host.values())
        assert most is None or parts <= most

    def _change_tables(self, plan: Plan) -> None:
        for back in plan.swap_in:
            row, table = back.sequence.row, tuple(back.sequence.pages)
            assert row not in self.rows
            state, saved = self.host.pop(back.sequence.request_id)
            assert pages_for(state.context, self.limits.page_size) <= back.restored <= len(saved)
            for page, content in zip(table, saved[: back.restored], strict=False):
                self.pages[self._shard(row)][page] = content
            self.rows[row] = dataclasses.replace(state, table=table)
        for step in plan.copies:
            pages = self.pages[step.shard]
            pages[step.destination] = _copied(pages[step.source])
        for new in plan.admissions:
            row = new.sequence.row
            assert row not in self.rows
            assert new.sequence.is_new or not self.limits.swaps_only
            tokens = list(new.sequence.tokens)
            context = max(0, new.cached - self.limits.prefix_tokens_read_again)
            self.rows[row] = Row(
                sequence=new.sequence,
                tokens=tokens,
                goal=len(tokens),
                cached=new.cached,
                context=context,
                drafted=0 if plan.undrafted else context,
                table=tuple(new.sequence.pages),
                draft=list(new.sequence.draft),
            )
            self._check_context(row, new.cached, 0 if plan.undrafted else new.cached)
            if self.limits.snapshots is not None and context:
                assert new.snapshot is not None
                assert self.snapshots[new.snapshot] == self._recurrent(self.rows[row])
        for sequence in plan.tables:
            self.rows[sequence.row].table = tuple(sequence.pages)

    def _recurrent(self, state: Row) -> tuple[int, object]:
        """What a row keeps outside of pages: something of all its tokens."""
        before = state.key(state.context - 1) if state.context else state.sequence.namespace
        return state.context, before

    def _check_ownership(self, plan: Plan) -> None:
        """Free pages may hold anything; pages that are written belong to one row."""
        for pages, shard in zip(self.pages, self.scheduler.shards, strict=True):
            for page in free_pages(shard.pages):
                for slot in pages[page]:
                    slot.target = slot.draft = POISON
        for row, state in self.rows.items():
            most = self.limits.max_length + self.limits.scratch_slots
            assert len(state.table) <= pages_for(most, self.limits.page_size)
            assert 0 not in state.table
            self._check_context(row, state.context, state.drafted)
        counts = {read.row: read.count for read in (*plan.reads, *plan.verifies)}
        for row, sequence in plan.sequences.items():
            state = self.rows[row]
            assert state.sequence is sequence
            assert sequence.is_unread == plan.undrafted
            if state.ended is None:
                first = max(state.context, state.cached)
                end = state.context + counts.get(row, 0)
                if row in plan.decode_rows:
                    limit = sequence.limit
                    most = end + plan.rounds * self.limits.tokens_per_round
                    end = min(most, limit) + self.limits.scratch_slots
                self._check_writable(row, range(first, end))

    def _check_writable(self, row: int, slots: range) -> None:
        state, size = self.rows[row], self.limits.page_size
        allocator = self.scheduler.shards[self._shard(row)].pages
        for index in {slot // size for slot in slots}:
            page = state.table[index]
            assert is_writable(allocator, page)
            for other, its in self.rows.items():
                same_shard = self._shard(other) == self._shard(row)
                assert other == row or not same_shard or page not in its.table

    # Calls.

    def _read(self, row: int, count: int, undrafted: bool) -> list[int]:
        state = self.rows[row]
        assert count > 0 and state.context + count <= state.goal
        self._check_context(row, state.context, state.drafted if undrafted else state.context)
        for position in range(state.context, state.context + count):
            if position >= state.cached:
                slot = self._slot(row, position)
                slot.target = state.key(position)
                slot.draft = POISON if undrafted else slot.target
        state.context += count
        if not undrafted:
            state.drafted = state.context
        if state.context < state.goal:
            return []
        return self._commit(row, 1)

    def _verify(self, row: int, count: int, given: int, undrafted: bool) -> list[int]:
        """Read a token, and those of the draft after it that the request's text has."""
        state, new = self.rows[row], []
        assert state.ended is None and state.context == given - 1 == state.goal - 1
        assert 1 < count <= 1 + len(state.draft) or count == 1
        written = range(state.context, state.context + count)
        for position in written:
            if position >= state.cached:
                slot = self._slot(row, position)
                slot.target = state.key(position)
                slot.draft = POISON if undrafted else slot.target
            new += self._commit(row, 1)
            state.context = position + 1
            state.drafted = state.drafted if undrafted else state.context
            state.goal = len(state.tokens)
            if state.ended or state.draft[:1] != new[-1:]:
                state.draft, state.goal = [], state.context
                for wrong in written[position + 1 - written.start :]:
                    slot = self._slot(row, wrong)
                    slot.target = slot.draft = SCRATCH
                break
            state.draft.pop(0)
        return new

    def _round(self, row: int, undrafted: bool) -> list[int]:
        state = self.rows[row]
        assert state.context >= state.goal, "a row decodes that has not read its prompt"
        if state.ended:
            return []
        self._check_context(row, state.context, state.drafted)
        if not undrafted:
            self._draft(row)
        before = state.context
        for offset in range(self.limits.scratch_slots):
            slot = self._slot(row, before + offset)
            slot.target = slot.draft = SCRATCH
        new = self._commit(row, self.random.randint(1, self.limits.tokens_per_round))
        state.context = len(state.tokens) - 1
        for position in range(before, state.context):
            self._slot(row, position).target = state.key(position)
        if not self.has_drafter and not undrafted:
            self._draft(row)
        return new

    def _commit(self, row: int, count: int) -> list[int]:
        """Add up to ``count`` tokens."""
        state, new = self.rows[row], []
        while len(new) < count and state.ended is None:
            new.append(next_token(state.sequence.request, state.tokens))
            state.tokens.append(new[-1])
            if new[-1] == STOP:
                state.ended = "stop"
            elif len(state.tokens) == state.sequence.limit:
                state.ended = "length"
        return new

    def _draft(self, row: int) -> None:
        """The drafter reads its pending tokens."""
        state = self.rows[row]
        for position in range(state.drafted, state.context):
            self._slot(row, position).draft = state.key(position)
        state.drafted = state.context

    def _check_context(self, row: int, context: int, drafted: int) -> None:
        state = self.rows[row]
        for position in range(context):
            slot, key = self._slot(row, position), state.key(position)
            assert slot.target == key, f"row {row}, position {position}: {slot.target}, not {key}"
            assert position >= drafted or slot.draft == key

    def _shard(self, row: int) -> int:
        return row * self.limits.shards // self.limits.num_rows

    def _page(self, row: int, page: int) -> list[Slot]:
        return self.pages[self._shard(row)][page]

    def _slot(self, row: int, position: int) -> Slot:
        page, offset = divmod(position, self.limits.page_size)
        return self._page(row, self.rows[row].table[page])[offset]


def is_empty(plan: Plan) -> bool:
    """Whether the device has nothing to do. ``timed_out`` and ``dropped`` may be set."""
    steps = (plan.swap_out, plan.catch_up, plan.release, plan.swap_in, plan.copies)
    return not (any(steps) or plan.admissions or plan.tables or plan.runs_model)


class Run:
    """A scheduler and a device, and what every request got.

    Attributes:
      texts: generated tokens of every request that was added.
      endings: why each ended.
      plans: all plans that were not empty.
    """

    def __init__(self, limits: Limits, *, seed: int = 0, has_drafter: bool = True, costs=None):
        self.scheduler = Scheduler(limits, costs)
        self.device = FakeDevice(self.scheduler, seed, has_drafter)
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}
        self.plans: list[Plan] = []
        self._launched: list[tuple[Plan, list[RowResult]]] = []

    def add(self, prompt, max_tokens: int = 8, **options) -> str:
        """Add a request; returns its id."""
        name = f"r{len(self.requests)}"
        options.setdefault("arrival", self.now)
        request = Request(name, tuple(prompt), max_tokens, **options)
        self.scheduler.limits.check(name, len(request.prompt), request.max_tokens)
        self.scheduler.add(request)
        self.requests[name] = request
        self.texts[name] = []
        return name

    def cancel(self, name: str) -> None:
        """End a request, if it has not ended."""
        self.scheduler.cancel(name)
        self.endings.setdefault(name, "cancelled")

    def step(self, lag: int = 0, *, undrafted: bool = False) -> Plan:
        """Make a plan and launch it; then take in what came out of all but the last ``lag``."""
        self.now += 1
        self.scheduler.undrafted = undrafted
        plan = self.scheduler.plan(self.now)
        could_go_on = self._launched or not is_empty(plan) or plan.timed_out
        assert could_go_on or not self.scheduler.num_waiting, "nothing happens any more"
        results = self.device.run(plan)
        for request_id in plan.timed_out:
            self._end(request_id, "timeout")
        if not is_empty(plan):
            self.plans.append(plan)
        if plan.runs_model:
            self._launched.append((plan, results))
        while len(self._launched) > (lag if plan.runs_model else 0):
            for delivery in self.scheduler.update(*self._launched.pop(0)):
                assert delivery.request_id not in self.endings
                self.texts[delivery.request_id] += delivery.tokens
                if delivery.ended:
                    self._end(delivery.request_id, delivery.ended)
        return plan

    def finish(self, lag: int = 0, most_steps: int = 5000) -> None:
        """Run until nothing is left, and check what every request got."""
        for _ in range(most_steps):
            if self.scheduler.is_idle:
                break
            self.step(lag)
        assert self.scheduler.is_idle
        self.check()

    def check(self) -> None:
        """Every request has ended, with the text that it has alone; no page is held."""
        assert self.endings.keys() == self.requests.keys()
        for name, request in self.requests.items():
            text, ending = text_alone(request, self.scheduler.limits.max_length)
            if self.endings[name] in ("stop", "length"):
                assert (self.texts[name], self.endings[name]) == (text, ending)
            else:
                assert self.texts[name] == text[: len(self.texts[name])]
        for shard in self.scheduler.shards:
            assert shard.pages.num_held == 0 and not shard.running
            assert len(shard.cache) == shard.pages.num_idle
            if shard.snapshots is not None:
                assert len(shard.snapshots) == len(shard.snapshots._slots)
        assert not self.device.rows and not self.device.host
        assert self.scheduler.host.parts == 0

    def _end(self, name: str, reason: str) -> None:
        assert name not in self.endings, f"{name} ended twice"
        self.endings[name] = reason
