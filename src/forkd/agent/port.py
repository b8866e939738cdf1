"""The byte stream to the host: a virtio-serial port, a vsock, or another socket when rehearsed on a host."""

from __future__ import annotations

import os
import select
import time

from forkd.agent.loop import READ, WRITE
from forkd.agent.outbox import HIGH_BYTES, Outbox
from forkd.wire.agent import NOISE, Parser, WireError, encode_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List

    from forkd.agent.loop import Loop
    from forkd.wire.agent import Frames

PORT_NAME = "org.forkd.agent"
_PORTS = "/sys/class/virtio-ports"
_PORT_WAIT_S = 30.0
_PORT_RETRY_S = 0.02
_READ_BYTES = 128 * 1024
_HANGUP = select.EPOLLHUP | select.EPOLLERR


class Port(Outbox):
    """Frames in and out of the port. `on_frames` and `on_hangup` are set by the server."""

    def __init__(self, loop: Loop, fd: int | None = None) -> None:
        """Without a descriptor it is broken until it gets one."""
        super().__init__(loop, -1)
        self.broken = True
        self.on_frames: Callable[[Frames], None] = _ignore
        self.on_hangup: Callable[[], None] = _nothing
        self.on_progress = self._after_progress
        self._parser = Parser()
        self._waiting: List[Callable[[], None]] = []
        # Level-triggered while the host is there: saves the read that only says "no more". A virtio port without a
        # host is always "ready" (hang-up), so then we only ask for edges.
        self._edge = False
        self._writing = False
        if fd is not None:
            self._attach(fd)

    @property
    def congested(self) -> bool:
        return self.pending > HIGH_BYTES

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Once, when the queue has drained enough to read more output from commands."""
        self._waiting.append(callback)

    def _attach(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.broken = False
        self._edge = False
        self._loop.watch(fd, READ, self._on_ready)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self.flush()
        if events & _HANGUP:
            self._hang_up()
        elif events & READ:
            if self._edge:
                self.broken = False
                self._set_edge(False)
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._received(data)
            else:
                self._hang_up()

    def _received(self, data: bytes) -> None:
        try:
            frames = self._parser.feed(data)
        except WireError:
            frames = []
        skipped = self._parser.take_skipped()
        if skipped:
            self.send(encode_json(NOISE, 0, {"skipped": skipped}))
        if frames:
            self.on_frames(frames)

    def _hang_up(self) -> None:
        if not self._edge:
            self._set_edge(True)
        self._discard_input()
        self._parser.reset()
        self.clear()
        self.broken = True  # until the host is back, what is sent is dropped
        self.on_hangup()

    def _discard_input(self) -> None:
        """What the host sent before it went: nobody waits for the answers, and the next client must not meet it."""
        try:
            while os.read(self.fd, _READ_BYTES):
                pass
        except OSError:
            pass

    def _set_edge(self, edge: bool) -> None:
        self._edge = edge
        self._arm()

    def _watch(self, on: bool) -> None:
        self._writing = on
        self._arm()

    def _break(self) -> None:
        self.clear()  # the hang-up that follows tells the rest

    def _arm(self) -> None:
        events = READ | WRITE if self._writing else READ
        self._loop.epoll.modify(self.fd, events | select.EPOLLET if self._edge else events)

    def _after_progress(self, _written: int) -> None:
        if self._waiting and self.pending <= HIGH_BYTES // 2:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()


def open_virtio_port() -> int:
    """The agent's port, waiting (bounded) for it to appear: it is probed while we start."""
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        device = _find_device()
        if device is not None:
            try:
                return os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                # The device node is made a moment after the port shows up in sysfs.
                pass
        if time.monotonic() > deadline:
            raise SystemExit("forkd agent: no virtio port named " + PORT_NAME)
        time.sleep(_PORT_RETRY_S)


def _find_device() -> str | None:
    try:
        ports = os.listdir(_PORTS)
    except OSError:
        return None
    for port in ports:
        try:
            with open(_PORTS + "/" + port + "/name") as file:
                name = file.read().strip()
        except OSError:
            continue
        if name == PORT_NAME:
            return "/dev/" + port
    return None


def _ignore(_frames: Frames) -> None:
    pass


def _nothing() -> None:
    pass
