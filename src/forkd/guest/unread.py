"""Data that a guest has sent and nobody has taken yet."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from forkd.wire.agent import MAX_PAYLOAD

# A guest may send single bytes, and change their kind each time. Behind this many pieces that wait, each kind is
# joined by itself: the order within a kind is kept, the one between kinds is not.
MAX_PIECES = 32

K = TypeVar("K")


class Unread(Generic[K]):
    """Pieces of a kind (such as "stdout"), in their order, small ones joined. The window bounds its bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._pieces: deque[tuple[K, bytearray]] = deque()
        self._last: dict[K, bytearray] = {}  # of each kind, while it waits

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, kind: K, data: bytes) -> None:
        self.size_bytes += len(data)
        last = self._last.get(kind)
        if last is not None and (len(self._pieces) >= MAX_PIECES or self._fits(kind, data)):
            last += data
            return
        piece = self._last[kind] = bytearray(data)
        self._pieces.append((kind, piece))

    def take(self) -> tuple[K, bytes]:
        """The oldest piece. There must be one."""
        kind, piece = self._pieces.popleft()
        self.size_bytes -= len(piece)
        if self._last[kind] is piece:
            del self._last[kind]
        return kind, bytes(piece)

    def _fits(self, kind: K, data: bytes) -> bool:
        newest, piece = self._pieces[-1]
        return newest == kind and len(piece) + len(data) <= MAX_PAYLOAD
