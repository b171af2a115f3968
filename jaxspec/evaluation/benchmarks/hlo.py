"""Parses the text of a compiled program: the instructions of its loop, and the scope of each."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

# Names given with jax.named_scope: phases of a round, and parts of a model's work.
PHASES = ("draft", "verify", "accept", "compact")
ROPE_PARTS = ("rope", "kv_write", "rope_kv_write")
MIXER_PARTS = ("indexer", "attention", "delta_rule", "state_space", "short_conv")
LAYER_PARTS = ("norm", "qkv", *ROPE_PARTS, *MIXER_PARTS, "o", "mlp", "activation", "streams")
PARTS = ("embed", "fc", *LAYER_PARTS, "lm_head", "sample")
OTHER = "other"

CONTAINERS = {"while", "conditional", "call"}
LAUNCH_NOTHING = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "copy-done", "async-done"),
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(([^()]*)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_SAME_AS = re.compile(r'\bdeduplicated_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{|(?:true|false)_computation=)([^}\s]*)")


@dataclasses.dataclass(frozen=True)
class Scope:
    """A phase of the round and a part of it; ``other`` if the program does not name them."""

    phase: str = OTHER
    part: str = OTHER


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arguments: the text between the parentheses.
      group: equal for instructions that share one kernel.
      called: names of the computations that it calls.
    """

    name: str
    opcode: str
    arguments: str
    op_name: str
    group: str
    called: tuple[str, ...]


def parse_scope(op_name: str) -> Scope:
    """The first phase and the last part in a path: verify and norm in ``a/verify/mlp/norm/mul``."""
    names = op_name.split("/")
    phase = next((name for name in names if name in PHASES), OTHER)
    part = next((name for name in reversed(names) if name in PARTS), OTHER)
    return Scope(phase, part)


def count_by_scope(text: str, operation: re.Pattern[str]) -> dict[str, int]:
    """Number of lines of a program's text that have an operation, by their scope.

    The keys are sorted: ``verify/mlp``, or ``all-reduce verify/mlp`` if the pattern has a group, by
    what it matched.
    """
    counts = collections.Counter()
    for line in text.splitlines():
        if found := operation.search(line):
            name = _OP_NAME.search(line)
            scope = parse_scope(name[1] if name else "")
            counts[" ".join([*found.groups(), f"{scope.phase}/{scope.part}"])] += 1
    return dict(sorted(counts.items()))


class Program:
    """A compiled program, from ``compiled.as_text()``."""

    def __init__(self, text: str):
        self.computations = _parse(text)  # by name; instructions in the order of the schedule
        self.instructions = {i.name: i for group in self.computations.values() for i in group}
        self._readers = self._find_readers()

    def loop(self) -> list[Instruction]:
        """The instructions of the largest loop that launch something, in order, including those of
        the computations that it calls.

        Raises ValueError if the program has no loop.
        """
        whiles = [i for i in self.instructions.values() if i.opcode == "while"]
        if not whiles:
            raise ValueError("the program has no loop")
        return max((list(self._launching(i.called)) for i in whiles), key=len)

    def scope(self, instruction: Instruction) -> Scope:
        """The scope of an instruction.

        The scope of a fusion is that of the product in it, else that of its root, else the most
        frequent one in it. Products that XLA has split have no name: their scope is that of the
        instruction that reads the result.
        """
        direct = parse_scope(instruction.op_name)
        fused = [i for name in instruction.called for i in self.computations[name]]
        products = [parse_scope(i.op_name) for i in fused if i.opcode == "dot"]
        for scope in (*products, direct):
            if scope.part != OTHER:
                return scope
        if not products:
            scopes = [parse_scope(i.op_name) for i in fused]
            scopes = [s for s in scopes if s.phase != OTHER and direct.phase in (OTHER, s.phase)]
            if scopes:
                named = [s for s in scopes if s.part != OTHER]
                return collections.Counter(named or scopes).most_common(1)[0][0]
        return direct if direct.phase != OTHER else self._scope_of_readers(instruction)

    def _scope_of_readers(self, instruction: Instruction) -> Scope:
        """The scope of the nearest named instruction that depends on this one."""
        queue, seen = collections.deque([instruction.name]), {instruction.name}
        while queue:
            for reader in self._readers[queue.popleft()]:
                scope = parse_scope(self.instructions[reader].op_name)
                if scope.phase != OTHER:
                    return scope
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
        return Scope()

    def _find_readers(self) -> dict[str, list[str]]:
        """Names of the instructions that read each one. A fusion is represented by the instructions
        inside it."""
        readers = collections.defaultdict(list)
        for instruction in self.instructions.values():
            if instruction.opcode in CONTAINERS:
                continue
            entrances = {}
            if instruction.opcode == "fusion":
                [fused] = instruction.called
                entrances = {
                    int(i.arguments): i.name
                    for i in self.computations[fused]
                    if i.opcode == "parameter"
                }
                readers[self.computations[fused][-1].name].append(instruction.name)
            for index, operand in enumerate(_OPERAND.findall(instruction.arguments)):
                readers[operand].append(entrances.get(index, instruction.name))
        return readers

    def _launching(self, names: Sequence[str]) -> Iterator[Instruction]:
        for name in names:
            for instruction in self.computations[name]:
                if instruction.opcode in CONTAINERS:
                    yield from self._launching(instruction.called)
                elif instruction.opcode not in LAUNCH_NOTHING:
                    yield instruction


def _parse(text: str) -> dict[str, list[Instruction]]:
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[1], [])
        elif found := _INSTRUCTION.match(line):
            current.append(_parse_instruction(found, line))
    return computations


def _parse_instruction(found: re.Match[str], line: str) -> Instruction:
    name, opcode, arguments = found.groups()
    op_name, same_as = _OP_NAME.search(line), _SAME_AS.search(line)
    branches = [name.strip(" %") for group in _BRANCHES.findall(line) for name in group.split(",")]
    return Instruction(
        name=name,
        opcode=opcode,
        arguments=arguments,
        op_name=op_name[1] if op_name else "",
        group=same_as[1] if same_as else name,
        called=(*_CALLED.findall(line), *branches),
    )
