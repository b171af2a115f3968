"""Sizes that programs are compiled for, and which compiled program serves a call.

Sizes are powers of two, so there are few. A call runs in the smallest program that is ready and
holds it; if there is none, in one that is compiled for the load. Prompts are not read by a program
that takes more than MOST_WASTE times as long as the one that fits: that one is compiled. In
deterministic mode all calls run in programs of the largest sizes.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.cache import pages_for
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape

SMALLEST_TABLE = 256  # tokens
SMALLEST_CHUNK = 16  # prompt tokens of a row in a call
MOST_WASTE = 2  # prompts are read by a ready program that takes at most so many times as long
MOST_CALLS = 2  # of a ready program with fewer rows, before one with enough rows is compiled
SWAPPED_TOKENS = 256  # of a row that are moved to host memory at a time
VERIFIED_AT_ONCE = 64  # tokens of a row: what comes after the end of its draft is read in vain
READ_CALL = 256  # tokens that a program may read for nothing, if else another had to be compiled

Read = tuple[int, int, int]  # a row, how many tokens, most tokens of the row
Reads = Sequence[Read]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an engine's state, and of the largest call.

    Attributes:
      num_rows: rows of all shards together.
      num_pages: null pages included.
      max_stops: most stop tokens of a row.
      scratch_slots: slots that a draft tree needs past the context.
      max_chunk: most prompt tokens of a row in a call.
      max_rounds: most rounds of a call.
      fixed_rounds: programs run one round or so many, see functional.decode; 0: as many as a call
        asks for.
      fixed: all calls have the largest sizes, and one kind serves greedy and sampled rows.
      trees: programs of rounds emit their trees.
      budget: EngineConfig.prefill_budget, as estimated where that is None.
      read_call: prompt tokens that could be read while a call is launched and reads the weights.
      least_table: tokens of the narrowest table that programs see.
    """

    num_rows: int
    shards: int
    max_length: int
    page_size: int
    num_pages: int
    max_stops: int
    scratch_slots: int
    max_chunk: int
    max_rounds: int
    fixed_rounds: int = 0
    fixed: bool = False
    trees: bool = False
    budget: int = 2048
    read_call: int = 0
    least_table: int = SMALLEST_TABLE

    @property
    def columns(self) -> int:
        """Columns of the widest page table."""
        return pages_for(self.max_length + self.scratch_slots, self.page_size)

    @property
    def part_pages(self) -> int:
        """Pages that are moved to host memory at a time."""
        return min(self.columns, max(1, SWAPPED_TOKENS // self.page_size))

    def columns_for(self, tokens: int) -> int:
        """Columns of the narrowest table that programs see for rows of so many tokens."""
        if self.fixed:
            return self.columns
        table = max(self.least_table, power_of_two(tokens))
        slots = table + self.scratch_slots + 1  # see functional.subset
        return min(pages_for(slots, self.page_size), self.columns)

    def rows_for(self, count: int) -> int:
        """Rows of the smallest program for so many rows of a shard."""
        return self.num_rows // self.shards if self.fixed else power_of_two(count)

    def width_for(self, tokens: int) -> int:
        """Tokens of a row in the smallest program that reads so many."""
        if self.fixed:
            return self.max_chunk
        return min(max(SMALLEST_CHUNK, power_of_two(tokens)), self.max_chunk)

    @property
    def verified_at_once(self) -> int:
        """Most tokens of a row that a call verifies."""
        return self.width_for(min(VERIFIED_AT_ONCE, self.max_length))

    @property
    def verified_rows(self) -> int:
        """Most rows of a shard that a call verifies: the budget has tokens for them, or one row."""
        share = self.num_rows // self.shards
        return min(share, power_of_two_within(self.budget // self.verified_at_once) or 1)

    def kind_for(self, kind: "Kind") -> "Kind":
        """The kind of program for rows of this kind."""
        return max(kind, Kind.SAMPLED) if self.fixed else kind

    # Lists of rows.

    def size_for(self, rows: Sequence[int]) -> int:
        """Rows, of each shard, of the smallest program that holds these."""
        return self.rows_for(max(map(len, self.by_shard(rows))))

    def by_shard(self, rows: Sequence[int]) -> list[list[int]]:
        share = self.num_rows // self.shards
        lists: list[list[int]] = [[] for _ in range(self.shards)]
        for row in rows:
            lists[row // share].append(row)
        return lists

    def listed(self, rows: Sequence[int], size: int) -> np.ndarray:
        """Rows as programs take them: ``size`` of each shard, padded."""
        return np.concatenate([self.padded(listed, size) for listed in self.by_shard(rows)])

    def padded(self, rows: Sequence[int], size: int) -> np.ndarray:
        """Row indices; those of padding are past the last row: int32 [size]."""
        return np.array([*rows, *[self.num_rows] * (size - len(rows))], np.int32)


class Kind(enum.IntEnum):
    """What the rows of a call may ask for. A later kind serves the requests of those before."""

    GREEDY = 0
    SAMPLED = 1
    FULL = 2  # controls and log-probabilities
    POLICY = 3  # log-probabilities under the policy that samples, too
    PROMPT = 4  # of the tokens of the prompt too: for reading only

    @classmethod
    def of(cls, sampling: SamplingParams, *, reads: bool = False) -> "Kind":
        """The first that serves the request, when it ``reads`` or decodes."""
        if reads and sampling.prompt_logprobs is not None:
            return cls.PROMPT
        if sampling.policy_logprobs:
            return cls.POLICY
        if sampling.needs_controls or sampling.logprobs is not None:
            return cls.FULL
        return cls.GREEDY if sampling.temperature == 0 else cls.SAMPLED

    @property
    def controls(self) -> bool:
        return self >= Kind.FULL


@dataclasses.dataclass
class Load:
    """What was asked for since the engine was last idle; programs are compiled for that size.

    Attributes:
      rows: most requests at once.
      tokens: of the longest of them, prompt included.
      kind: SAMPLED if one of them samples. FULL programs are compiled for calls that need them.
      undrafted: the rows of the call that comes are unread: programs without a drafter serve them.
    """

    rows: int = 0
    tokens: int = 0
    kind: Kind = Kind.GREEDY
    undrafted: bool = False

    def add(self, rows: int, tokens: int, kind: Kind) -> None:
        """A request of so many tokens came, of this kind; ``rows`` are under way with it."""
        self.rows, self.tokens = max(self.rows, rows), max(self.tokens, tokens)
        self.kind = max(self.kind, min(kind, Kind.SAMPLED))


class ReadKey(NamedTuple):
    """Sizes of a program that reads prompts; ``rows`` of each shard.

    ``masked``: the host may restrict the first token.
    ``undrafted``: it has no drafter, see undrafted.py.
    """

    rows: int
    columns: int
    width: int
    kind: Kind
    masked: bool = False
    undrafted: bool = False

    def holds(self, other: "ReadKey") -> bool:
        return (
            self.rows >= other.rows
            and self.columns >= other.columns
            and self.width >= other.width
            and self.kind >= other.kind
            and self.masked >= other.masked
            and self.undrafted <= other.undrafted
        )

    @property
    def cost(self) -> int:
        """How long a call takes, as a number of tokens: what it reads, and reading the weights."""
        return self.rows * self.width + READ_CALL


class RoundsKey(NamedTuple):
    """Sizes of a program of rounds; ``rows`` of each shard.

    ``masked``: of one round in two programs, between which the host restricts the tokens.
    ``rounds``: that it runs; 0: as many as a call asks for.
    ``undrafted``: it has no drafter, see undrafted.py.
    """

    rows: int
    columns: int
    shape: TreeShape
    kind: Kind
    masked: bool = False
    rounds: int = 0
    undrafted: bool = False

    def holds(self, other: "RoundsKey") -> bool:
        return (
            self.rows >= other.rows
            and self.columns >= other.columns
            and (self.shape, self.rounds) == (other.shape, other.rounds)
            and self.kind >= other.kind
            and self.masked == other.masked
            and self.undrafted <= other.undrafted
        )

    @property
    def cost(self) -> int:
        return self.rows * self.columns


class VerifyKey(NamedTuple):
    """Sizes of a program that verifies old texts as drafts; ``rows`` of each shard."""

    rows: int
    columns: int
    width: int
    kind: Kind

    def holds(self, other: "VerifyKey") -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    @property
    def cost(self) -> int:
        return self.rows * self.columns


def groups_of_reads(
    reads: Reads, sizes: Sizes, masked: set[int]
) -> list[tuple[tuple[int, bool], list[Read]]]:
    """Those that a program can read together: by width, and whether their rows are ``masked``.

    Narrow ones are read with wider ones where that takes no longer than two calls.
    """
    groups: dict[tuple[bool, int], list[Read]] = {}
    for read in reads:
        groups.setdefault((read[0] in masked, sizes.width_for(read[1])), []).append(read)
    merged: list[tuple[tuple[int, bool], list[Read]]] = []
    for (is_masked, width), group in sorted(groups.items()):
        if merged and merged[-1][0][1] == is_masked:
            (narrow, _), others = merged[-1]
            both = [*others, *group]
            two_calls = _read_cost(others, narrow, sizes) + _read_cost(group, width, sizes)
            if _read_cost(both, width, sizes) <= two_calls:
                merged[-1] = (width, is_masked), both
                continue
        merged.append(((width, is_masked), group))
    return merged


def _read_cost(reads: Reads, width: int, sizes: Sizes) -> int:
    """Tokens that could be read in the time of a call that reads these; see Sizes.read_call."""
    return sizes.size_for([row for row, *_ in reads]) * width + sizes.read_call


def in_parts(reads: Reads, most: int) -> Iterator[Reads]:
    """The reads in calls of at most so many tokens of each row, one after the other."""
    while reads:
        yield [(row, min(count, most), tokens) for row, count, tokens in reads]
        reads = [(row, count - most, tokens) for row, count, tokens in reads if count > most]


def widest(ready: Iterable[object], wanted: ReadKey) -> int:
    """Tokens of a row that are read at a time where nothing is compiled any more: those wanted, or
    as many as a program that is ready reads."""
    keys = [key for key in ready if isinstance(key, ReadKey)]
    widths = [key.width for key in keys if key.holds(wanted._replace(width=0))]
    return min(wanted.width, max(widths, default=wanted.width))


def choose_reading(
    ready: Iterable[object],
    wanted: ReadKey,
    target: ReadKey,
    *,
    sealed: bool,
    read_call: int = 0,
) -> ReadKey:
    """The program that reads: one of those ready, or ``target``, which is then compiled.

    It may have fewer rows than wanted: then it is called several times, which nothing limits once
    ``sealed``. For ``read_call`` see Sizes.
    """

    def calls(key: ReadKey) -> int:
        return -(-wanted.rows // key.rows)

    def tokens(key: ReadKey) -> int:
        return calls(key) * (key.rows * key.width + max(read_call, READ_CALL))

    keys = [key for key in ready if isinstance(key, ReadKey)]
    fitting = [key for key in keys if key.holds(wanted._replace(rows=0))]
    if not sealed:
        most = MOST_WASTE * tokens(target)
        fitting = [key for key in fitting if tokens(key) <= most and calls(key) <= MOST_CALLS]
        fitting = [key for key in fitting if key.kind <= target.kind]
        fitting = [key for key in fitting if key.undrafted == target.undrafted]

    def cost(key: ReadKey) -> tuple[int, ...]:
        return tokens(key), calls(key), not key.undrafted, key.columns, key.kind, key.masked

    return min(fitting, key=cost, default=target)


def choose_rounds(
    ready: Iterable[object], wanted: RoundsKey, target: RoundsKey, *, sealed: bool
) -> RoundsKey:
    """The program of rounds: one of those ready, or ``target``, which is then compiled."""
    fitting = [key for key in ready if isinstance(key, RoundsKey) and key.holds(wanted)]
    if not sealed:
        fitting = [key for key in fitting if key.cost <= target.cost]
        fitting = [key for key in fitting if key.kind <= target.kind]
        fitting = [key for key in fitting if key.undrafted == target.undrafted]
    return min(fitting, key=lambda key: (key.cost, not key.undrafted, key.kind), default=target)


def choose_verifying(ready: Iterable[object], wanted: VerifyKey, target: VerifyKey) -> VerifyKey:
    """The program that verifies: the cheapest of those ready that hold what is wanted, or
    ``target``, which is then compiled. So it is compiled once, for all rows of the load."""
    fitting = [key for key in ready if isinstance(key, VerifyKey) and key.holds(wanted)]
    return min(fitting, key=lambda key: (key.cost, key.kind), default=target)


def compiles_alone(key: ReadKey | RoundsKey) -> bool:
    """Whether the program can be compiled before it runs; not with controls or masks."""
    return not (key.kind.controls or key.masked)


def power_of_two(number: int) -> int:
    """The smallest that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def power_of_two_within(number: int) -> int:
    """The largest that is not above ``number``; 0 if there is none."""
    return (1 << number.bit_length()) // 2


def page_list(pages: Sequence[int], size: int) -> np.ndarray:
    """Padded with the null page: int32 [size]."""
    return np.array([*pages, *[0] * (size - len(pages))], np.int32)
