"""One open exchange with the host, by the id the host chose for it."""

from __future__ import annotations

from forkd.wire.agent import WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    Request = Dict[str, Any]
    Done = Callable[[int], None]


class Stream:
    """The events of a stream; each kind overrides those it needs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.credit = WINDOW_BYTES  # how much more output the host is ready to take

    def on_data(self, payload: bytes) -> None:
        pass

    def on_end(self) -> None:
        """The host sends no more data."""

    def on_window(self, grant: int) -> None:
        self.credit += grant

    def on_control(self, request: Request) -> None:
        pass

    def on_clock(self, unix_ns: int) -> None:
        pass

    def on_cancel(self) -> None:
        """Nobody waits for the answer any more: end without one."""

    def on_detach(self) -> None:
        """This machine was forked, and the stream belongs to the source. By default the same as `on_cancel`."""
        self.on_cancel()


class Refused(Exception):
    """A request that is answered with an error of a known code."""

    def __init__(self, code: str, message: str, errno_name: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.errno_name = errno_name
