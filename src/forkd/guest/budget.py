"""How much output of guests the daemon keeps in memory for answers that are not sent yet."""

from __future__ import annotations

# Each answer has this much for sure; what it keeps beyond comes from the budgets of its guest and of the process.
SURE_BYTES = 256 * 1024
GUEST_BYTES = 32 * 1024 * 1024
ALL_GUESTS_BYTES = 64 * 1024 * 1024


class Budget:
    """Bytes to hand out. What is taken counts against `parent` too."""

    def __init__(self, limit_bytes: int, parent: Budget | None = None) -> None:
        self._free = limit_bytes
        self._parent = parent

    @property
    def free_bytes(self) -> int:
        return self._free if self._parent is None else min(self._free, self._parent.free_bytes)

    def take(self, wanted: int) -> int:
        """As much of it as there is."""
        given = min(wanted, self.free_bytes)
        self._change(-given)
        return given

    def give_back(self, size: int) -> None:
        self._change(size)

    def _change(self, size: int) -> None:
        self._free += size
        if self._parent is not None:
            self._parent._change(size)


class Lease:
    """What one answer has taken. It goes back when the answer, and whoever still sends it, are gone."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._sure = SURE_BYTES
        self._taken = 0

    def take(self, wanted: int) -> int:
        """How many of `wanted` bytes may be kept."""
        sure = min(wanted, self._sure)
        self._sure -= sure
        taken = self._budget.take(wanted - sure) if wanted > sure else 0
        self._taken += taken
        return sure + taken

    def __del__(self) -> None:
        self._budget.give_back(self._taken)


ALL_GUESTS = Budget(ALL_GUESTS_BYTES)
