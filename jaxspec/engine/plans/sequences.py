"""What the engine knows of the sequences of a plan: their requests, and the programs for them."""

from collections.abc import Iterable

from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.sizes import Kind, Reads
from jaxspec.scheduling.plan import Plan
from jaxspec.scheduling.sequence import Sequence


def generation_of(sequence: Sequence) -> Generation:
    """The request of a sequence, as the engine keeps it."""
    generation = sequence.request.payload
    assert isinstance(generation, Generation)
    return generation


def kind_of(sequences: Iterable[Sequence], *, reads: bool = False) -> Kind:
    """The kind of programs that serves all of these, when they read or decode."""
    return max(Kind.of(generation_of(each).sampling, reads=reads) for each in sequences)


def reads_of(plan: Plan) -> Reads:
    """What a plan reads, as Programs takes it."""
    return [(read.row, read.count, plan.sequences[read.row].limit) for read in plan.reads]
