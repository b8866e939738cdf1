"""A port that clients connect to: the guest's vsock, or a unix socket when rehearsed."""

from __future__ import annotations

import _socket
import os

from forkd.agent.loop import READ
from forkd.agent.port import Port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from forkd.agent.loop import Loop

_PARAMETER = "forkd.agent"
_MAX_PORT = 2**32 - 2  # the next one means any
_BACKLOG = 8


class ListeningPort(Port):
    """One client at a time; the next one is accepted when it has gone, as QEMU does. Takes over `listener`."""

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
            return  # the client is gone again
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
    """Of a vsock's clients only the host: with a loopback transport any user of the guest could come, too."""
    return not isinstance(address, tuple) or address[0] == _socket.VMADDR_CID_HOST


def parse_vsock_port(cmdline: str) -> int | None:
    """What the kernel's command line says about us: `forkd.agent=vsock:<port>`, or nothing."""
    found = None
    for word in cmdline.split():
        name, _, value = word.partition("=")
        if name == _PARAMETER:
            kind, _, port = value.partition(":")
            if kind != "vsock" or not port.isdecimal() or int(port) > _MAX_PORT:
                raise SystemExit("forkd agent: %s is not %s=vsock:<port>" % (word, _PARAMETER))
            found = int(port)
    return found


def open_vsock(port: int) -> int:
    """A listener for the host, whatever our address is: it may be another one after a fork."""
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
