"""The byte stream to the host: a virtio-serial port, a vsock, or another socket when it runs on a host."""

from __future__ import annotations

import _socket
import os
import select
import time

from forkd.agent.loop import READ, WRITE
from forkd.agent.pipes import HIGH_BYTES, Outbox
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
_PARAMETER = "forkd.agent"
_MAX_VSOCK_PORT = 2**32 - 2  # the next one means any
_BACKLOG = 8
_HANGUP = select.EPOLLHUP | select.EPOLLERR


class Port(Outbox):
    """Frames in and out of the port. `on_frames` and `on_hangup` are set by the server."""

    def __init__(self, loop: Loop, fd: int | None = None) -> None:
        """Without a descriptor it drops what is sent until it gets one."""
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
        """What waits to be read stays: the next client may be here already, and have sent its greeting."""
        if not self._edge:
            self._set_edge(True)
        self._parser.reset()
        self.clear()
        self.broken = True  # until the host is back, what is sent is dropped
        self.on_hangup()

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
    """The agent's port; waits for it with a deadline, because the kernel probes it while we start."""
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


class ListeningPort(Port):
    """One client at a time; the next is accepted when it has left, as QEMU does. Takes over `listener`."""

    def __init__(self, loop: Loop, listener: int) -> None:
        super().__init__(loop)
        os.set_inheritable(listener, False)
        os.set_blocking(listener, False)
        self._listener = _socket.socket(fileno=listener)
        self._await_client()

    def _await_client(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, self._on_client)

    def _on_client(self, _events: int) -> None:
        try:
            fd, address = self._listener._accept()  # type: ignore[attr-defined]
        except (BlockingIOError, ConnectionError):
            return  # the client has left again
        if not is_host(address):
            os.close(fd)
            return
        self._loop.unwatch(self._listener.fileno())
        self._attach(fd)

    def _hang_up(self) -> None:
        super()._hang_up()
        self._loop.unwatch(self.fd)
        os.close(self.fd)
        self.fd = -1
        self._await_client()


def is_host(address: object) -> bool:
    """On a vsock only the host may connect: with a loopback transport any user of the guest could."""
    return not isinstance(address, tuple) or address[0] == _socket.VMADDR_CID_HOST


def parse_vsock_port(cmdline: str) -> int | None:
    """From `forkd.agent=vsock:<port>` on the kernel's command line; None without it."""
    found = None
    for word in cmdline.split():
        name, _, value = word.partition("=")
        if name == _PARAMETER:
            kind, _, port = value.partition(":")
            if kind != "vsock" or not port.isdecimal() or int(port) > _MAX_VSOCK_PORT:
                raise SystemExit("forkd agent: %s is not %s=vsock:<port>" % (word, _PARAMETER))
            found = int(port)
    return found


def open_vsock(port: int) -> int:
    """A listener on any address of ours: it may be another one after a fork."""
    listener = None
    try:
        listener = _socket.socket(_socket.AF_VSOCK, _socket.SOCK_STREAM)
        listener.bind((_socket.VMADDR_CID_ANY, port))
        listener.listen(_BACKLOG)
        return listener.detach()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise SystemExit("forkd agent: cannot listen on vsock port %d: %s" % (port, error)) from None
