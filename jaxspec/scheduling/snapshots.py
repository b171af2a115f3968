"""Which copies of rows' recurrent states exist, and which are given up first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxspec.scheduling.prefix_cache import Node


class Snapshots:
    """Slots 0 .. count - 1, each for a copy of what a row keeps outside of pages.

    The copy that belongs to a node of the prefix cache is that before the last token of the node's
    page: a row that begins there reads this token again, as all rows with cached tokens do.

    A slot is *free*, *pending* (a row reads beyond it, but its page is not known yet), or belongs
    to a node. If none is free, the node that was used least recently loses its slot.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()  # by node id; used last is last

    def __len__(self) -> int:
        """Slots that are not free."""
        return self.count - len(self._free)

    def take(self) -> int | None:
        """A slot for a new copy; None: all are pending."""
        if self._free:
            return self._free.pop()
        return self._slots.popitem(last=False)[1] if self._slots else None

    def give_back(self, slots: Iterable[int]) -> None:
        """Free pending slots."""
        self._free.extend(slots)

    def attach(self, node: Node, slot: int) -> None:
        """A pending slot belongs to a node from now on. If the node has one, it is freed."""
        if node.id in self._slots:
            self._free.append(slot)
            slot = self._slots[node.id]
        self._slots[node.id] = slot
        self._slots.move_to_end(node.id)

    def remove(self, node: Node) -> None:
        """Free the slot of a node that is forgotten, if it has one."""
        slot = self._slots.pop(node.id, None)
        if slot is not None:
            self._free.append(slot)

    def covered(self, chain: Sequence[Node]) -> list[Node]:
        """The beginning of a chain up to the last node that has a slot."""
        for length in range(len(chain), 0, -1):
            if chain[length - 1].id in self._slots:
                return list(chain[:length])
        return []

    def use(self, node: Node) -> int:
        """The slot of a node that has one."""
        self._slots.move_to_end(node.id)
        return self._slots[node.id]
