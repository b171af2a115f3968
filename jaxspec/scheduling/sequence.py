"""The host's view of one request that waits or runs."""

import dataclasses
import enum
import math
from collections.abc import Hashable, Iterable

from jaxspec.scheduling.prefix_cache import Node


@dataclasses.dataclass(frozen=True)
class Request:
    """What the scheduler must know of a request.

    Attributes:
      prompt: token ids, at least one.
      priority: smaller goes first.
      arrival: seconds, on the clock that the scheduler is told; earlier goes first.
      deadline: when it ends as "timeout", on that clock; None: never.
      cache_salt: requests with other salts share no pages with this one.
      group: samples of one prompt have the same group; one reads the prompt, the others share its
        pages.
      reads_all: it reads its whole prompt, even what is cached.
      masked: the host drafts, or restricts, its tokens before every round.
      begins_free: not from the first one on, but once its row has paused.
      draft: a text that may follow the prompt: it is verified first.
      payload: what the engine keeps of it; the scheduler does not look at it.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: float
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    group: str | None = None
    reads_all: bool = False
    masked: bool = False
    begins_free: bool = False
    draft: tuple[int, ...] = ()
    payload: object = None

    def with_draft(self, draft: tuple[int, ...]) -> "Request":
        return dataclasses.replace(self, draft=draft)


class State(enum.Enum):
    WAITING = enum.auto()  # for a row: new, or preempted
    READING = enum.auto()  # its prompt
    DECODING = enum.auto()  # as far as planned: its prompt may still be read by a call in flight
    ENDED = enum.auto()


class DrafterRead(enum.Enum):
    """What the drafter has read of a sequence; the rest it reads only with all of it, anew."""

    ALL = enum.auto()  # but for a few last tokens
    PART = enum.auto()  # the beginning
    NOTHING = enum.auto()


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request, its tokens so far, and what it holds.

    Calls in flight have been planned, but what they emitted is not yet known; so the number of
    tokens is known within bounds only.

    Attributes:
      order: number of requests that were added before.
      limit: most tokens, prompt included.
      tokens: prompt, then those generated as far as known. The last one, the root, has no KV yet
        once the prompt is read.
      row: row that it holds; -1: none.
      pages: pages that it holds, in the order of its page table.
      table_changed: whether the device must be told of the pages.
      chain: the nodes of its first pages in the prefix cache.
      goal: tokens that it reads before it decodes: those known when it was admitted.
      read: how many of them are read once the calls in flight are done.
      draft: what may follow ``tokens``, and is to be verified. Before that all tokens but the last
        are read: the token after it is compared with the draft's first.
      verifying: whether a call in flight verifies a part of the draft. What it keeps is not known,
        so nothing further is planned for the sequence.
      drafter_read: what the drafter has read of it, or will have.
      num_complete_tokens: tokens whose KV, the drafter's included unless it reads nothing, is known
        to be complete.
      needs_drafter_catch_up: whether it has full pages that the drafter must complete if it ends.
      branch: tokens of known pages that it began with, though no snapshot reached as far.
      snapshots: pending slots (see Snapshots), by the tokens up to the end of their pages.
      flights: calls in flight that it is part of.
      least, most: bounds of the tokens that these calls add, unless it ends.
      swapped: pages of it in host memory.
      preemptions: times that it lost its row to others.
      free: whether the host leaves its tokens alone for now, though it is ``masked``.
      paused: whether its row is done, and has to be told to go on.
    """

    request: Request
    order: int
    limit: int
    tokens: list[int]
    state: State = State.WAITING
    row: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    table_changed: bool = False
    chain: list[Node] = dataclasses.field(default_factory=list)
    goal: int = 0
    read: int = 0
    draft: list[int] = dataclasses.field(default_factory=list)
    verifying: bool = False
    drafter_read: DrafterRead = DrafterRead.ALL
    num_complete_tokens: int = 0
    needs_drafter_catch_up: bool = False
    branch: int = 0
    snapshots: dict[int, int] = dataclasses.field(default_factory=dict)
    flights: int = 0
    least: int = 0
    most: int = 0
    swapped: int = 0
    preemptions: int = 0
    free: bool = False
    paused: bool = False

    def __post_init__(self):
        self.free = self.request.begins_free
        self.set_draft(self.request.draft)

    @property
    def masked(self) -> bool:
        """Whether the host restricts its tokens before its next round."""
        return self.request.masked and not self.free

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_row(self) -> bool:
        return self.row >= 0

    @property
    def has_begun(self) -> bool:
        """Whether it has, or had, a row."""
        return self.state is not State.WAITING or self.preemptions > 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def namespace(self) -> tuple[Hashable, ...]:
        """What its KV depends on beside its tokens."""
        if self.drafter_read is DrafterRead.NOTHING:
            return (self.request.cache_salt, DrafterRead.NOTHING)
        return (self.request.cache_salt,)

    @property
    def is_unread(self) -> bool:
        """Whether the drafter has not read all: what it drafts would be poor."""
        return self.drafter_read is not DrafterRead.ALL

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller ranks run first, and are preempted last."""
        return (self.request.priority, self.request.arrival, self.order)

    @property
    def queue_rank(self) -> tuple[int, bool, float, int]:
        """Place in the queue: who was preempted goes to the head of its priority."""
        return (self.request.priority, self.preemptions == 0, self.request.arrival, self.order)

    @property
    def is_new(self) -> bool:
        """Whether it has generated nothing."""
        return len(self.tokens) == self.prompt_length

    @property
    def most_context(self) -> int:
        """Most tokens that have KV after the calls in flight, and once its prompt is read."""
        if self.state is State.DECODING:
            return min(len(self.tokens) + self.most, self.limit) - 1
        return len(self.tokens) + len(self.draft)

    @property
    def left_to_read(self) -> int:
        """Tokens that it reads before it decodes, or before its draft is verified."""
        return self.goal - self.read - bool(self.draft)

    @property
    def has_read(self) -> bool:
        """Whether earlier plans read what it reads before it decodes or its draft is verified."""
        return self.state is State.DECODING or (
            self.state is State.READING and not self.left_to_read
        )

    @property
    def left_to_verify(self) -> int:
        """Tokens of its draft, and the one before; 0: the draft is not to be verified now."""
        waits = self.state is not State.READING or self.left_to_read or self.verifying
        return 0 if waits or not self.draft else 1 + len(self.draft)

    def set_draft(self, tokens: Iterable[int]) -> None:
        """Verify this draft next, as far as its limit allows. It is not in a call."""
        self.draft = list(tokens)[: max(0, self.limit - len(self.tokens) - 1)]

    def verified(self, kept: int, *, reads_on: bool) -> None:
        """A call has added ``kept`` tokens that it verified. Unless it ``reads_on``, they end with
        a token of the target's that the draft does not have, or that comes after it."""
        self.verifying, self.draft = False, self.draft[kept:] if reads_on else []
        if not self.has_row:  # it was preempted meanwhile
            return
        self.read = len(self.tokens) - 1
        self.goal = len(self.tokens) if reads_on else self.read
        self.state = State.READING if reads_on else State.DECODING

    def pause(self, *, masked: bool) -> None:
        """Its row is done, but must go on: the host restricts its tokens from there, or not."""
        self.free = not masked
        self.paused = self.has_row or bool(self.swapped)

    @property
    def is_surely_done(self) -> bool:
        """Whether the calls in flight end it in any case."""
        return len(self.tokens) + self.least >= self.limit

    @property
    def most_rounds(self) -> int:
        """Most rounds that are of use to it."""
        return self.limit - len(self.tokens) - self.least

    def expect_drafter(self, reads: bool) -> None:
        """Before it gets a row: whether the drafter reads its tokens, unless they were swapped."""
        if not self.swapped:
            self.drafter_read = DrafterRead.ALL if reads else DrafterRead.NOTHING

    def leave_drafter_out(self) -> None:
        """From now on the drafter reads nothing of it."""
        if self.drafter_read is DrafterRead.ALL:
            self.drafter_read, self.needs_drafter_catch_up = DrafterRead.PART, False

    def expected_rounds(self, rate: float) -> int:
        """Rounds after those in flight until it ends, at so many tokens a round."""
        return math.ceil((self.limit - len(self.tokens)) / max(1.0, rate)) - self.least

    @property
    def may_be_swapped(self) -> bool:
        """Not while it reads, nor if it is to be read again anyway."""
        return self.state is State.DECODING and not self.is_unread

    @property
    def is_unseen(self) -> bool:
        """Whether no round since it read its tokens has shown what it accepts, and might do so."""
        return len(self.tokens) <= self.goal + 1 and not self.is_unread

    def slots(self, rounds: int, tokens_per_round: int, scratch_slots: int) -> int:
        """Slots that it may write in a call of so many rounds, those before included."""
        return min(self.most_context + rounds * tokens_per_round, self.limit) + scratch_slots
