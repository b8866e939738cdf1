"""One exchange with the agent: a request, perhaps data both ways, one final answer, a deadline."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from forkd.errors import (
    AGENT_CODES,
    AgentError,
    CommandNotStarted,
    Conflict,
    ForkdError,
    GuestFull,
    GuestTimeout,
    InvalidInput,
    NotFound,
    ProtocolError,
    Unsupported,
)
from forkd.guest.channel import Channel
from forkd.wire.agent import (
    CALL,
    DATA,
    FAIL,
    GRANT_BYTES,
    MAX_PAYLOAD,
    REPLY,
    WINDOW,
    WINDOW_BYTES,
    WireError,
    decode_json,
    decode_window,
    encode,
    encode_window,
)

# What a guest may call its errors, and the class a caller would catch. The rest is AgentError under its own code.
_ERRORS: dict[str, type[ForkdError]] = {
    "not_found": NotFound,
    "exists": Conflict,
    "not_empty": Conflict,
    "invalid": InvalidInput,
    "not_started": CommandNotStarted,
    "no_space": GuestFull,
    "unsupported": Unsupported,
}
# Instead of the guest's words: "No space left on device" could be any device.
_MESSAGES = {"no_space": "The guest's disk is full"}
_HINTS = {"no_space": "It is in the guest's memory: remove files there, or make its snapshot with more --memory"}
CALL_S = 30.0
_MESSAGE_LIMIT = 500
_PATH_SHOWN = 300
_UNCOUNTED_BYTES = 64 * 1024
_MAX_VALUES = 256 * 1024  # in a guest's JSON; as objects they take 30 times the bytes they were sent in
_MAX_NUMBER = 1 << 63  # also keeps out NaN and infinity, which JSON in Python lets in


class Exchange:
    """Open from construction on. `what` completes "The guest did not … in time"; refusals name `about`, a path."""

    def __init__(
        self,
        channel: Channel,
        what: str,
        kind: int,
        payload: bytes,
        deadline_s: float | None,
        about: str | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._about = about
        self.number = 0
        self._channel = channel
        self._what = what
        self._answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._allowed = WINDOW_BYTES  # how much more data the guest may send
        self._taken = 0  # how much of it was used up, and not yet granted again
        self._credit = WINDOW_BYTES  # how much more data we may send
        self._credit_waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        channel.open(self, kind, payload)
        if deadline_s is not None:
            self._timer = loop.call_later(deadline_s, self._on_deadline, deadline_s)

    @property
    def ended(self) -> bool:
        return self._answer.done()

    async def answer(self) -> tuple[int, bytes]:
        """Flags and payload of the final answer; a refusal is raised."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.abandon()
            raise

    async def answer_json(self) -> dict[str, Any]:
        _, payload = await self.answer()
        return parse_object(payload)

    def abandon(self) -> None:
        """The caller has stopped waiting."""
        self._stop_timer()
        self._channel.cancel(self)
        self._fail(AgentError(f"The caller stopped waiting for the guest to {self._what}"))

    async def send_data(self, data: bytes) -> None:
        """All of `data`, as fast as the guest takes it. Returns early when the exchange has ended."""
        view = memoryview(data)
        while view and not self._answer.done():
            if self._credit <= 0:
                self._credit_waiter = asyncio.get_running_loop().create_future()
                await self._credit_waiter
                continue
            size = min(len(view), self._credit, MAX_PAYLOAD)
            self._credit -= size
            self._channel.send(encode(DATA, self.number, bytes(view[:size])))
            view = view[size:]
            await self._channel.room()

    def send_control(self, kind: int, payload: bytes = b"") -> None:
        if not self._answer.done():
            self._channel.send(encode(kind, self.number, payload))

    def acknowledge(self, size: int) -> None:
        """`size` bytes of received data are used up: the guest may send as many again."""
        self._taken += size
        if self._taken >= GRANT_BYTES and not self._answer.done():
            self._allowed += self._taken
            grant, self._taken = self._taken, 0
            self._channel.send(encode_window(self.number, grant))

    # For the channel

    def on_frame(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == REPLY:
            self._finish()
            self._settle((flags, payload))
        elif kind == FAIL:
            failure = parse_failure(payload, self._about)
            self._finish()
            self._fail(failure)
        elif kind == DATA:
            self._allowed -= len(payload)
            if not payload:
                raise ProtocolError("The guest sent data without a byte")
            if self._allowed < 0:
                raise ProtocolError("The guest sent more data than it was granted")
            self.on_data(flags, payload)
        elif kind == WINDOW:
            grant = decode_window(payload)
            # No agent grants less; each grant wakes a sender, who sends as little.
            if grant < GRANT_BYTES:
                raise ProtocolError(f"The guest granted {grant} bytes, less than a step of {GRANT_BYTES}")
            self._credit += grant
            if self._credit > WINDOW_BYTES:
                raise ProtocolError("The guest granted more than a window")
            self._wake_sender()
        else:
            self.on_other(kind, payload)

    def on_lost(self, error: ForkdError) -> None:
        self._stop_timer()
        self._fail(error)

    def on_data(self, flags: int, payload: bytes) -> None:
        raise ProtocolError(f"The guest sent data while it was asked to {self._what}")

    def on_other(self, kind: int, payload: bytes) -> None:
        raise ProtocolError(f"The guest sent a frame of kind {kind} while it was asked to {self._what}")

    # Endings

    def _on_deadline(self, deadline_s: float) -> None:
        self._channel.cancel(self)
        self._fail(GuestTimeout(f"The guest did not {self._what} within {deadline_s:g} s"))

    def _finish(self) -> None:
        self._channel.finish(self)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self, answer: tuple[int, bytes]) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)
        self._wake_sender()

    def _fail(self, error: ForkdError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # read once: a caller that stopped waiting is not an error
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._credit_waiter is not None and not self._credit_waiter.done():
            self._credit_waiter.set_result(None)


class Caller:
    """Makes simple calls: one request, one answer, both JSON."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    async def call(
        self, request: dict[str, Any], what: str, deadline_s: float = CALL_S, about: str | None = None
    ) -> dict[str, Any]:
        return await Exchange(self.channel, what, CALL, json.dumps(request).encode(), deadline_s, about).answer_json()


def parse_object(payload: bytes) -> dict[str, Any]:
    if len(payload) > _UNCOUNTED_BYTES and sum(map(payload.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ProtocolError(f"The guest's answer has more than {_MAX_VALUES} values")
    try:
        value: dict[str, Any] = decode_json(payload)
    except WireError as error:
        raise ProtocolError(f"The guest's answer is invalid: {error}") from error
    return value


def parse_failure(payload: bytes, about: str | None = None) -> ForkdError:
    """`about`: the path that was asked for, which the guest does not repeat."""
    answer = parse_object(payload)
    code, message = answer.get("code"), answer.get("message")
    if not isinstance(code, str) or not isinstance(message, str):
        raise ProtocolError("The guest refused without saying why")
    text = message[:_MESSAGE_LIMIT]
    errno_name = answer.get("errno")
    if about is not None:
        text = f"{_MESSAGES.get(code, text)}: {_shown(about)}"
    elif isinstance(errno_name, str):
        text = f"{text} ({errno_name[:20]})"
    made = _ERRORS.get(code, AgentError)(text, hint=_HINTS.get(code))
    if type(made) is AgentError and code in AGENT_CODES:
        made.code = code
    return made


def _shown(path: str) -> str:
    text = path if path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= _PATH_SHOWN else f"{text[:_PATH_SHOWN]}..."


def get_text(answer: dict[str, Any], key: str, limit: int) -> str:
    value = answer.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"The guest's answer has no valid text {key!r}")
    return value


def get_int(answer: dict[str, Any], key: str, low: int = 0, high: int = 1 << 63) -> int:
    value = answer.get(key)
    if type(value) is not int or not low <= value < high:
        raise ProtocolError(f"The guest's answer has no valid number {key!r}")
    return value


def get_float(answer: dict[str, Any], key: str) -> float:
    value: Any = answer.get(key)
    if type(value) not in (int, float) or not abs(value) < _MAX_NUMBER:
        raise ProtocolError(f"The guest's answer has no valid number {key!r}")
    return float(value)


def get_flag(answer: dict[str, Any], key: str) -> bool:
    value = answer.get(key, False)
    if not isinstance(value, bool):
        raise ProtocolError(f"The guest's answer has no valid flag {key!r}")
    return value
