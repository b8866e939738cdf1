"""One open exchange with the host, by the id the host chose for it."""

from __future__ import annotations

from forkd.wire.agent import WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict


class Stream:
    """What the server may tell a stream; each kind overrides what means something to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.credit = WINDOW_BYTES  # how much more output the host is ready to take

    def on_data(self, payload: bytes) -> None:
        pass

    def on_end(self) -> None:
        """The host sends no more data."""

    def on_window(self, grant: int) -> None:
        self.credit += grant

    def on_control(self, request: Dict[str, Any]) -> None:
        pass

    def on_clock(self, unix_ns: int) -> None:
        pass

    def on_cancel(self) -> None:
        """Nobody listens any more: end, without an answer."""

    def on_detach(self) -> None:
        """This machine was forked: the host of the stream is somebody else's host. By default the same as its end."""
        self.on_cancel()


class Refused(Exception):
    """A request that is answered with an error of a known code."""

    def __init__(self, code: str, message: str, errno_name: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.errno_name = errno_name
