"""A plan while it is made."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.scheduling.plan import (
    Admission,
    Ended,
    PageCopy,
    Plan,
    Read,
    Snapshot,
    SwapIn,
    SwapOut,
    Table,
)
from jaxspec.scheduling.sequence import Sequence


class Flight(NamedTuple):
    """What a plan's calls do to a sequence.

    Attributes:
      read: prompt tokens that are read afterwards.
      least, most: tokens that are added, unless it ends.
    """

    sequence: Sequence
    read: int
    least: int
    most: int


@dataclasses.dataclass
class PlanBuilder:
    """The steps of a plan so far.

    Attributes:
      restored: sequences that come back from host memory, with their pages there.
      admitted: other sequences that get a row, with the tokens whose KV they find, and the slot
        of a snapshot that they begin with.
      flights: what the calls do to the sequence of each row.
    """

    swap_out: list[SwapOut] = dataclasses.field(default_factory=list)
    catch_up: list[int] = dataclasses.field(default_factory=list)
    release: list[int] = dataclasses.field(default_factory=list)
    restored: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    admitted: list[tuple[Sequence, int, int | None]] = dataclasses.field(default_factory=list)
    reads: list[Read] = dataclasses.field(default_factory=list)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    decode_rows: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    masked_rows: list[int] = dataclasses.field(default_factory=list)
    flights: dict[int, Flight] = dataclasses.field(default_factory=dict)

    def add_flight(self, sequence: Sequence, least: int, most: int) -> None:
        """Note that a call of this plan adds so many tokens to a sequence."""
        earlier = self.flights.get(sequence.row)
        if earlier is None:
            sequence.flights += 1
            earlier = Flight(sequence, sequence.read, 0, 0)
        self.flights[sequence.row] = earlier._replace(
            least=earlier.least + least, most=earlier.most + most
        )
        sequence.least += least
        sequence.most += most

    def finish(
        self, index: int, running: Iterable[Sequence], ended: list[Ended], dropped: list[str]
    ) -> Plan:
        """The plan, with the tables as they are now."""
        swap_in = [SwapIn(s.row, s, pages, s.take_table()) for s, pages in self.restored]
        admissions = [
            Admission(s.row, s, cached, s.take_table(), snapshot)
            for s, cached, snapshot in self.admitted
        ]
        tables = [Table(s.row, s.take_table()) for s in running if s.table_changed]
        return Plan(
            index=index,
            ended=tuple(ended),
            dropped=tuple(dropped),
            swap_out=tuple(self.swap_out),
            catch_up=tuple(self.catch_up),
            release=tuple(self.release),
            swap_in=tuple(swap_in),
            copies=tuple(self.copies),
            admissions=tuple(admissions),
            tables=tuple(tables),
            reads=tuple(self.reads),
            snapshots=tuple(self.snapshots),
            decode_rows=tuple(self.decode_rows),
            rounds=self.rounds,
            masked_rows=tuple(self.masked_rows),
            sequences={row: flight.sequence for row, flight in self.flights.items()},
        )
