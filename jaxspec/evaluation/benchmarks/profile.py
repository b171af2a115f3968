"""Profiles decoding rounds: attributes profiler events to scopes of the program."""

import collections
import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.evaluation.benchmarks.hlo import CONTAINERS, Instruction, Program, Scope


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel launch, copy or CPU operation.

    Attributes:
      name: name of the kernel; on a CPU, of the instruction.
      hlo_op: the instruction, or the command buffer (CUDA graph), that launched it.
    """

    name: str
    hlo_op: str
    start_ns: float
    duration_ns: float


@dataclasses.dataclass(frozen=True)
class Span:
    """An event of a round. ``counted_us`` excludes time that overlaps with earlier events."""

    name: str
    scope: Scope
    start_us: float
    duration_us: float
    counted_us: float


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, from its first event to the first event of the next round."""

    spans: tuple[Span, ...]
    length_us: float
    longest_gap_us: float

    @property
    def gaps_us(self) -> float:
        """Time in which nothing ran."""
        return self.length_us - sum(span.counted_us for span in self.spans)


@dataclasses.dataclass(frozen=True)
class Profile:
    """All rounds except the last of each call, and the device's longest pause between calls."""

    rounds: tuple[Round, ...]
    host_gap_us: float | None  # None: a single call


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means over rounds."""

    us: float
    launches: float


def record(run: Callable[[], Any]) -> list[Event]:
    """The device's events while ``run`` runs, in order of their start."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [path] = Path(folder).rglob("*.xplane.pb")
        return read_events(jax.profiler.ProfileData.from_file(str(path)))


def read_events(data: Any) -> list[Event]:
    """The events of a ProfileData: those of the first GPU's streams or, without a GPU, the CPU's
    operations (where several CPUs are simulated, those of the first)."""
    lines = [(plane.name, line) for plane in data.planes for line in plane.lines]
    first = min((plane for plane, _ in lines if "GPU" in plane), default=None)
    streams = [line for plane, line in lines if plane == first and "Stream" in line.name]
    events = []
    for line in streams or [line for _, line in lines]:
        for event in line.events:
            facts = dict(event.stats)
            hlo_op = str(facts.get("hlo_op", ""))
            is_program = (
                hlo_op and not event.name.startswith("end: ") and not facts.get("device_ordinal")
            )
            if streams or is_program:
                events.append(Event(event.name, hlo_op, event.start_ns, event.duration_ns))
    return sorted(events, key=lambda event: event.start_ns)


def profile_rounds(
    events: Sequence[Event], program: Program, rounds_per_call: int, num_calls: int
) -> Profile:
    """Divide the events of ``num_calls`` calls into rounds, and attribute them to scopes.

    Raises ValueError if no instruction runs exactly once per round.
    """
    containers = {i.name for i in program.instructions.values() if i.opcode in CONTAINERS}
    events = [event for event in events if event.name not in containers]
    loop = _Loop(program)
    starts, first = loop.round_starts(events, rounds_per_call * num_calls)
    loop.begin_with(first)
    rounds, pauses = [], []
    for index, (start, stop) in enumerate(itertools.pairwise(starts), 1):
        inside, end_ns = events[start:stop], events[stop].start_ns
        if index % rounds_per_call:
            spans = tuple(spans_of(inside, loop.scopes(inside)))
            length_us = 1e-3 * (end_ns - inside[0].start_ns)
            rounds.append(Round(spans, length_us, _longest_gap(inside, end_ns)))
        else:
            pauses.append(_longest_gap(inside, end_ns))
    return Profile(tuple(rounds), max(pauses, default=None))


def summarize[Key: Hashable](
    rounds: Sequence[Round], key: Callable[[Span], Key]
) -> dict[Key, Cost]:
    """Mean cost per round of the spans with equal keys, in descending order of cost."""
    spans = collections.defaultdict(list)
    for span in itertools.chain.from_iterable(round_.spans for round_ in rounds):
        spans[key(span)].append(span.counted_us)
    costs = {name: Cost(sum(us) / len(rounds), len(us) / len(rounds)) for name, us in spans.items()}
    return dict(sorted(costs.items(), key=lambda item: -item[1].us))


class _Loop:
    """The instructions of the loop over rounds, and which of them launched an event.

    A kernel is named after an instruction. Equal instructions share one kernel: the n-th event with
    its name belongs to the n-th of them. Kernels of libraries and of Pallas have other names: they
    are attributed to the instructions between those of the events before and after them.
    """

    def __init__(self, program: Program):
        self.order = program.loop()
        self.scope_by_name = {i.name: program.scope(i) for i in self.order}
        self.group_by_name = {i.name: i.group for i in program.instructions.values()}
        self.group_by_kernel = {kernel_name(name): g for name, g in self.group_by_name.items()}
        self.begin_with(self.order[0])

    def begin_with(self, first: Instruction) -> None:
        """Rotate the order so that the round starts with ``first``."""
        split = self.order.index(first)
        self.order = self.order[split:] + self.order[:split]
        self.index = {i.name: position for position, i in enumerate(self.order)}
        self.members = collections.defaultdict(list)
        for instruction in self.order:
            self.members[instruction.group].append(instruction)

    def candidates(self, event: Event) -> list[Instruction] | None:
        """Instructions that may have launched an event: [] if it is not from the loop, None if its
        name is not that of an instruction."""
        if event.hlo_op in self.index:
            return [self.order[self.index[event.hlo_op]]]
        if event.hlo_op in self.group_by_name:
            return []
        group = self.group_by_kernel.get(event.name)
        return None if group is None else self.members[group]

    def round_starts(
        self, events: Sequence[Event], num_rounds: int
    ) -> tuple[list[int], Instruction]:
        """Indices of the events that begin a round, and the instruction that launched them."""
        found = collections.defaultdict(list)
        for index, event in enumerate(events):
            match self.candidates(event):
                case [only]:
                    found[only].append(index)
        once = [(indices, i) for i, indices in found.items() if len(indices) == num_rounds]
        if not once:
            raise ValueError(
                f"no instruction of the loop has {num_rounds} events in the profile, one per round"
            )
        return min(once, key=lambda pair: pair[0][0])

    def scopes(self, events: Sequence[Event]) -> list[Scope]:
        """The scope of each event of one round."""
        launched_by: list[Instruction | None] = [None] * len(events)
        nameless, by_candidates = [], collections.defaultdict(list)
        for index, event in enumerate(events):
            candidates = self.candidates(event)
            if candidates is None:
                nameless.append(index)
            elif candidates:
                by_candidates[tuple(candidates)].append(index)
        for candidates, indices in by_candidates.items():
            for index, instruction in zip(indices, spread(candidates, len(indices)), strict=True):
                launched_by[index] = instruction
        for indices in _runs(nameless):
            between = self._between(launched_by[: indices[0]], launched_by[indices[-1] + 1 :])
            for index, instruction in zip(indices, spread(between, len(indices)), strict=True):
                launched_by[index] = instruction
        return [Scope() if i is None else self.scope_by_name[i.name] for i in launched_by]

    def _between(
        self, before: Sequence[Instruction | None], after: Sequence[Instruction | None]
    ) -> list[Instruction]:
        """Instructions between two sequences that may have launched kernels with other names; if
        there are none, the last instruction before."""
        last = next((self.index[i.name] for i in reversed(before) if i), -1)
        following = next((self.index[i.name] for i in after if i), len(self.order))
        between = [i for i in self.order[last + 1 : following] if i.opcode != "fusion"]
        return between or [self.order[max(last, 0)]]


def kernel_name(instruction: str) -> str:
    """The name that XLA gives an instruction's kernel."""
    return re.sub(r"\W", "_", instruction)


def spread[T](items: Sequence[T], count: int) -> list[T]:
    """``count`` items in order, each repeated about equally often."""
    return [items[index * len(items) // count] for index in range(count)]


def _runs(indices: Sequence[int]) -> list[list[int]]:
    """Groups of consecutive indices."""
    by_offset = itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    return [[index for _, index in run] for _, run in by_offset]


def spans_of(events: Sequence[Event], scopes: Sequence[Scope]) -> Iterator[Span]:
    """The spans of events, in order of their start, from the first one's start on."""
    origin = done = events[0].start_ns
    for event, scope in zip(events, scopes, strict=True):
        end = event.start_ns + event.duration_ns
        yield Span(
            name=event.name,
            scope=scope,
            start_us=1e-3 * (event.start_ns - origin),
            duration_us=1e-3 * event.duration_ns,
            counted_us=1e-3 * max(0.0, end - max(done, event.start_ns)),
        )
        done = max(done, end)


def _longest_gap(events: Sequence[Event], end_ns: float) -> float:
    """Microseconds in which nothing ran, from the first event to ``end_ns``."""
    done, longest = events[0].start_ns, 0.0
    for start, stop in [*((e.start_ns, e.start_ns + e.duration_ns) for e in events), (end_ns, 0.0)]:
        longest, done = max(longest, start - done), max(done, stop)
    return 1e-3 * longest
