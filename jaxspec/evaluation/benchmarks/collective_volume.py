"""What the devices of a compiled program send to each other: collectives and their bytes."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from pallas_kernels.reduce_add_rms_norm.exchange import Tuning

# Each of k devices sends (k - 1) / k of an operation's whole array so often: of the result of an
# all-reduce, all-gather or all-to-all, and of the operand of a reduce-scatter. Rings send as much.
SENT: Mapping[str, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
}
EXCHANGING = "reduce_add_rms_norm"  # the kernel in which devices leave rows for each other
OTHERS = ("collective-permute", "collective-broadcast", "ragged-all-to-all")

_NUMBER_TYPES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join((*SENT, *OTHERS))})(?:-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_EXCHANGE = re.compile(rf"= \(bf16\[(\d+),(\d+)\].* custom-call\(.*/{EXCHANGING}_kernel/")
# The three ways in which XLA writes groups of devices.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_EQUAL_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, or a kernel in which devices exchange rows.

    Attributes:
      kind: such as ``all-reduce``, or the kernel's name.
      devices: that take part in it together.
      sent_bytes: by each device.
    """

    kind: str
    devices: int
    sent_bytes: float


def parse_collectives(text: str) -> list[Collective]:
    """The collectives of a program's text, each once however often it runs.

    Raises ValueError for kinds, types and groups of devices that this function does not know.
    """
    found = []
    for line in text.splitlines():
        if operation := _COLLECTIVE.search(line):
            result, kind = operation.groups()
            if kind in OTHERS:
                raise ValueError(f"no rule says what devices send for {kind}: {line.strip()[:100]}")
            devices = _group_size(line)
            size = sum(_size(*array) for array in _ARRAY.findall(result))
            if kind == "all-reduce" and result.startswith("(("):
                size /= 2  # the result of a start that gives operands back: ((operands), results)
            elif kind != "all-reduce" and f"{kind}-start(" in line:
                size *= devices / (devices + 1)  # the result of a start holds the operands, too
            elif kind == "reduce-scatter":
                size *= devices
            found.append(Collective(kind, devices, SENT[kind] * (devices - 1) / devices * size))
    return found


def parse_exchanges(text: str, devices: int) -> list[Collective]:
    """The calls of ``EXCHANGING`` over so many devices in a program's text."""
    found = []
    for rows, width in (map(int, sizes) for sizes in _EXCHANGE.findall(text)):
        sent = Tuning.of(devices, width).sent_bytes(devices, rows, width)
        found.append(Collective(EXCHANGING, devices, sent))
    return found


def totals(operations: Iterable[Collective]) -> dict[str, tuple[int, float]]:
    """Kind -> (number, bytes that each device sends)."""
    found: dict[str, tuple[int, float]] = {}
    for operation in operations:
        count, sent = found.get(operation.kind, (0, 0.0))
        found[operation.kind] = count + 1, sent + operation.sent_bytes
    return found


def _size(kind: str, sizes: str) -> int:
    if kind not in _NUMBER_TYPES:
        raise ValueError(f"{kind} is not a known type of arrays that devices exchange")
    return _NUMBER_TYPES[kind] * math.prod(int(size) for size in sizes.split(",") if size)


def _group_size(line: str) -> int:
    if groups := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", groups[2]))
    if groups := _LISTED_GROUPS.search(line):
        return len(groups[1].split(","))
    if groups := _EQUAL_GROUPS.search(line):
        return int(groups[1])
    raise ValueError(f"the groups of devices cannot be read: {line.strip()[:300]}")
