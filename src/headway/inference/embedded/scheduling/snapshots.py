"""Snapshots of recurrent states at block boundaries: the slots that hold them, by prefix. Pure bookkeeping."""

from collections import OrderedDict
from collections.abc import Sequence


class Snapshots:
    """Slots `first` to `first + count - 1`, each with the state after some prefix, named by the hash of its last block.

    A state is saved at the end of a step, so a name given while a step is scheduled is found from the next step on. The
    least recently used snapshot makes room for a new one.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._coming: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots or name in self._coming

    def coming(self, name: bytes) -> bool:
        """Tell if the step that is being scheduled saves the state of this name."""
        return name in self._coming

    def settle(self) -> None:
        """Make the snapshots of the last step findable."""
        self._slots |= self._coming
        self._coming.clear()

    def deepest(self, names: Sequence[bytes]) -> tuple[int, int | None]:
        """The number of blocks up to the last of `names` that has a snapshot, and its slot; (0, None) if none has."""
        for count in range(len(names), 0, -1):
            if (slot := self._slots.get(names[count - 1])) is not None:
                self._slots.move_to_end(names[count - 1])
                return count, slot
        return 0, None

    def reserve(self) -> int | None:
        """A slot to save a state to, which no name has; None where all are taken by states without a name."""
        if not self._free and self._slots:
            self._free.append(self._slots.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def name(self, slot: int, name: bytes) -> None:
        """Name a reserved slot; it is free again if another has this name."""
        if name in self:
            self._free.append(slot)
        else:
            self._coming[name] = slot

    def release(self, slot: int) -> None:
        """Give back a slot that got no name."""
        self._free.append(slot)

    def forget(self, name: bytes) -> None:
        """Drop a snapshot, if there is one."""
        slot = self._slots.pop(name, None)
        slot = self._coming.pop(name, None) if slot is None else slot
        if slot is not None:
            self._free.append(slot)

    def forget_all(self) -> None:
        self._free += [*self._slots.values(), *self._coming.values()]
        self._slots.clear()
        self._coming.clear()
