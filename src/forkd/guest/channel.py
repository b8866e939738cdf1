"""One connected stream socket to a guest's agent, shared by many exchanges.

The guest is not trusted: it may send anything, at any rate, or nothing. All it sends is bounded by frames, by
the window of each exchange and by a budget for what belongs to none; what breaks the protocol ends the channel.
Nothing here awaits per message: one event loop serves a hundred guests. So each gets a bounded turn of it, and one
that sends many small frames is read more slowly: its agent then has to join its output into larger ones.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from typing import Protocol

from forkd.errors import AgentError, ChannelClosed, ForkdError, GuestTimeout, InvalidInput, ProtocolError
from forkd.guest.budget import ALL_GUESTS, GUEST_BYTES, Budget
from forkd.guest.pace import Pace
from forkd.wire.agent import (
    CANCEL,
    DATA,
    HEADER_SIZE,
    MAX_FRAME,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    MAX_STREAMS,
    MORE,
    WINDOW_BYTES,
    Joiner,
    Parser,
    WireError,
    encode,
    encode_message,
    padding,
)

_READ_BYTES = 32 * 1024  # in one turn of the loop: others wait while it is handled
# What a guest may still have under way for a client before us: its queue, and one message per stream cut short.
_STALE_BYTES = 4 * 1024 * 1024
# Frames that belong to no exchange, beyond what cancelled ones may still have under way.
_LATE_BYTES = 1024 * 1024
_HIGH_BYTES = 1024 * 1024  # queued towards the guest; above it, writers wait
_MAX_QUEUED = 16_384  # messages; a guest that sends and never reads makes us queue grants without end
# A frame costs the daemon some 5 us, however small: a turn takes about a millisecond, a flood 8 % of the daemon's time.
_TURN_FRAMES = 256
_FRAMES_HZ = 16_000  # twice what an honest agent, whose frames are answers or output, was seen to send
_FRAMES_BURST = 2_000
_WRITE_STALL_S = 60.0


class Receiver(Protocol):
    """What the channel needs to know of an exchange."""

    number: int

    def on_frame(self, kind: int, flags: int, payload: bytes) -> None: ...
    def on_lost(self, error: ForkdError) -> None: ...


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over, and closes it in the end."""
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._parser = Parser()
        self._joiner = Joiner()
        self._pace = Pace(_FRAMES_HZ, _FRAMES_BURST)
        self._pause: asyncio.TimerHandle | None = None
        self.budget = Budget(GUEST_BYTES, ALL_GUESTS)  # of output kept for answers
        self._receivers: dict[int, Receiver] = {}
        # Random, so that what the guest still sends to a client before us is not taken for an answer to us.
        self._next_number = secrets.randbelow(1 << 30) + 1
        self._synchronised = False
        self._stale_budget = _STALE_BYTES
        self._late_budget = _LATE_BYTES
        self._out: deque[bytes] = deque()
        self._pending = 0
        self.largest_sent = 0  # bytes of a frame that may be half sent at any moment
        self._room: list[asyncio.Future[None]] = []
        self._error: ForkdError | None = None
        self._reading = False
        self._read(True)

    @property
    def closed(self) -> bool:
        return self._error is not None

    def open(self, receiver: Receiver, kind: int, payload: bytes) -> None:
        """Start an exchange: number it and send its request."""
        if self._error is not None:
            raise self._lost_error()
        if len(self._receivers) >= MAX_STREAMS:
            error = AgentError(f"More than {MAX_STREAMS} exchanges with one guest at a time")
            error.code = "too_many"
            raise error
        if len(payload) > MAX_MESSAGE:
            raise InvalidInput(
                f"The request has {len(payload)} bytes as it is sent to the guest, and may have {MAX_MESSAGE}",
                hint="Write large content to a file of the guest",
            )
        receiver.number = self._next_number
        self._next_number += 1
        message = encode_message(kind, receiver.number, payload)
        self._receivers[receiver.number] = receiver
        self.send(message)

    def finish(self, receiver: Receiver) -> None:
        """Its final answer has come."""
        self._receivers.pop(receiver.number, None)

    def cancel(self, receiver: Receiver) -> None:
        """The caller has stopped waiting. Frames under way may still arrive."""
        if self._receivers.pop(receiver.number, None) is not None and self._error is None:
            self._late_budget += WINDOW_BYTES + MAX_MESSAGE
            self.send(encode(CANCEL, receiver.number))

    def send(self, data: bytes) -> None:
        """At once if the socket takes it, else queued. Bounded by the windows of the exchanges."""
        self.largest_sent = max(self.largest_sent, min(len(data), MAX_FRAME))
        self._send(data)

    def pad(self, size: int) -> None:
        """Complete what somebody else may have sent half of."""
        self._send(padding(size))

    def _send(self, data: bytes) -> None:
        if self._error is not None:
            raise self._lost_error()
        if not self._out:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._lose(ChannelClosed("The channel to the guest broke"), error)
                raise self._lost_error() from error
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif len(self._out) >= _MAX_QUEUED:
            self._lose(ProtocolError("The guest sends, and reads nothing of what is sent to it"))
            raise self._lost_error()
        self._out.append(data)
        self._pending += len(data)

    async def room(self) -> None:
        """Wait until the guest has taken most of what is queued."""
        if self._pending <= _HIGH_BYTES or self._error is not None:
            return
        waiter = self._loop.create_future()
        self._room.append(waiter)
        try:
            async with asyncio.timeout(_WRITE_STALL_S):
                await waiter
        except TimeoutError:
            raise GuestTimeout(f"The guest took nothing from its channel for {_WRITE_STALL_S:.0f} s") from None

    def close(self) -> None:
        self._lose(ChannelClosed("The channel to the guest was closed"))

    # Incoming

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(ChannelClosed("The channel to the guest broke"), error)
            return
        if not data:
            self._lose(ChannelClosed("The guest's side of the channel was closed"))
            return
        self._take_turn(data)

    def _take_turn(self, data: bytes = b"") -> None:
        """Handle what has arrived, up to a number of frames; then the others' turn comes."""
        try:
            handled = self._received(data)
        except WireError as error:
            self._lose(ProtocolError(f"The guest broke the protocol: {error}"), error)
        except ProtocolError as error:
            self._lose(error)
        except Exception as error:
            # A mistake of ours, or of a caller's callback: the frames behind it are lost, so nothing pending may wait.
            self._lose(ChannelClosed("An answer of the guest could not be handled"), error)
        else:
            self._end_turn(handled)

    def _end_turn(self, handled: int) -> None:
        if self._error is not None:
            return
        # A turn without a frame is a step too: a guest may send its bytes one by one.
        wait_s = self._pace.spend(max(1, handled), self._loop.time())
        if wait_s > 0 or self._parser.stopped:
            self._read(False)
            self._pause = self._loop.call_later(wait_s, self._after_pause)
        else:
            self._read(True)

    def _after_pause(self) -> None:
        if self._parser.stopped:
            self._take_turn()
        else:
            self._read(True)

    def _read(self, on: bool) -> None:
        if on and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        elif self._reading and not on:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = on

    def _received(self, data: bytes) -> int:
        """How many frames it handled."""
        frames = self._parser.feed(data, _TURN_FRAMES)
        if skipped := self._parser.take_skipped():
            # Before the frames: what is skipped with the first answer came before it, or belongs to a stream of old.
            self._spend(skipped, garbage=True)
        for kind, flags, number, payload in frames:
            receiver = self._receivers.get(number)
            if receiver is None:
                self._spend(HEADER_SIZE + len(payload))
                continue
            self._synchronised = True
            if flags & MORE or self._joiner.active:
                whole = self._join(kind, flags, number, payload)
                if whole is None:
                    continue
                payload = whole
            receiver.on_frame(kind, flags, payload)
            if self._error is not None:
                break
        return len(frames)

    def _join(self, kind: int, flags: int, number: int, payload: bytes) -> bytes | None:
        """As the agent splits messages: into full frames, and never DATA, which is bounded by its window."""
        if flags & MORE and (kind == DATA or len(payload) != MAX_PAYLOAD):
            raise ProtocolError("The guest split a message into frames that are not full")
        whole = self._joiner.join(kind, flags, number, payload)
        if self._joiner.overflowed:
            raise ProtocolError(f"The guest sent a message larger than {MAX_MESSAGE} bytes")
        return whole

    def _spend(self, size: int, garbage: bool = False) -> None:
        """Account for bytes that belong to no exchange of ours."""
        if not self._synchronised:
            self._stale_budget -= size
        elif garbage:
            raise ProtocolError(f"The guest sent {size} bytes that are not a frame")
        else:
            self._late_budget -= size
        if self._stale_budget < 0 or self._late_budget < 0:
            raise ProtocolError("The guest floods its channel with data that was not requested")

    # Outgoing

    def _on_writable(self) -> None:
        try:
            while self._out:
                head = self._out[0]
                sent = self._sock.send(head)
                self._pending -= sent
                if sent < len(head):
                    self._out[0] = head[sent:]
                    break
                self._out.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lose(ChannelClosed("The channel to the guest broke"), error)
            return
        if not self._out:
            self._loop.remove_writer(self._sock.fileno())
        if self._pending <= _HIGH_BYTES // 2:
            self._wake_writers()

    def _wake_writers(self) -> None:
        waiting, self._room = self._room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    # The end

    def _lose(self, error: ForkdError, cause: BaseException | None = None) -> None:
        if self._error is not None:
            return
        error.__cause__ = cause
        self._error = error
        if self._pause is not None:
            self._pause.cancel()
        self._read(False)
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._out.clear()
        self._pending = 0
        receivers = list(self._receivers.values())
        self._receivers.clear()
        for receiver in receivers:
            receiver.on_lost(error)
        self._wake_writers()

    def _lost_error(self) -> ForkdError:
        first = self._error or ChannelClosed("The channel to the guest was closed")
        again = type(first)(first.message)
        again.__cause__ = first
        return again
