"""Profiles the reading of prompts: which kernels run, for which part of the model, and how long."""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence

from jaxspec.evaluation.benchmarks.hlo import CONTAINERS, OTHER, Program, Scope
from jaxspec.evaluation.benchmarks.profile import Event, kernel_name, spans_of

_NUMBERS = re.compile(r"([._]+\d+)+$")


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """What one kind of kernel took while prompts were read.

    Attributes:
      part: of the model's work (see hlo.PARTS), as the program names it.
      kernel: name of the kernels, without the numbers that XLA counts them by.
      us: without time that overlaps with kernels that began earlier.
    """

    part: str
    kernel: str
    us: float
    launches: int


@dataclasses.dataclass(frozen=True)
class PromptProfile:
    """The kernels by their cost, the time from the first one's start to the last one's end, and the
    part of it in which nothing ran."""

    kernels: tuple[KernelCost, ...]
    length_us: float
    gaps_us: float


def profile_prompt(events: Sequence[Event], program: Program) -> PromptProfile:
    """Attribute the events of reading prompts, in order of their start, to kernels and parts.

    Raises ValueError if there are no events.
    """
    containers = {i.name for i in program.instructions.values() if i.opcode in CONTAINERS}
    events = [event for event in events if event.name not in containers]
    if not events:
        raise ValueError("the profile has no events of the device")
    by_kernel = {kernel_name(name): i for name, i in program.instructions.items()}
    scope_of = functools.cache(program.scope)

    def scope(event: Event) -> Scope:
        instruction = program.instructions.get(event.hlo_op) or by_kernel.get(event.name)
        return Scope() if instruction is None else scope_of(instruction)

    found = list(map(scope, events))
    costs = collections.defaultdict(list)
    for span in spans_of(events, found):
        costs[span.scope.part, kind_of(span.name)].append(span.counted_us)
    kernels = [KernelCost(part, kind, sum(us), len(us)) for (part, kind), us in costs.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    length_us = 1e-3 * (max(e.start_ns + e.duration_ns for e in events) - events[0].start_ns)
    return PromptProfile(tuple(kernels), length_us, length_us - sum(k.us for k in kernels))


def kind_of(kernel: str) -> str:
    """A kernel's name without XLA's numbers: ``loop_fusion`` of ``loop_fusion_12``."""
    return _NUMBERS.sub("", kernel) or OTHER
