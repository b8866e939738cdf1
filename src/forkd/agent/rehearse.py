"""The agent as the `fake` engine runs it: on a listening socket, client after client, with its evaluations kept."""

from __future__ import annotations

import _socket
import os

from forkd.agent.loop import READ, Loop
from forkd.agent.main import adopt_orphans, settle
from forkd.agent.platform import Rehearsal
from forkd.agent.port import Port
from forkd.agent.server import Server
from forkd.wire.agent import EVAL, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from forkd.wire.agent import Frames


def rehearse(listener: int, root: str, journal: str) -> None:
    """Until it is killed. The first client is connected already, or the agent waits for it."""
    settle()
    adopt_orphans()
    os.set_inheritable(listener, False)
    loop = Loop()
    loop.catch_children()
    port = ListeningPort(loop, listener)
    Server(loop, port, Rehearsal(root), dict(os.environ))
    port.on_frames = Journal(journal, port.on_frames).take
    loop.run()


class ListeningPort(Port):
    """One client at a time; the next one is accepted when it has gone, as QEMU does."""

    def __init__(self, loop: Loop, listener: int) -> None:
        self._listener = _socket.socket(fileno=listener)
        super().__init__(loop, self._accept())

    def _hang_up(self) -> None:
        super()._hang_up()
        self._loop.unwatch(self.fd)
        os.close(self.fd)
        self._loop.watch(self._listener.fileno(), READ, self._on_client)

    def _on_client(self, _events: int) -> None:
        fd = self._accept()
        os.set_blocking(fd, False)
        self.fd = fd
        self.broken = False
        self._edge = False
        self._loop.unwatch(self._listener.fileno())
        self._loop.watch(fd, READ, self._on_ready)

    def _accept(self) -> int:
        fd: int = self._listener._accept()[0]  # type: ignore[attr-defined]
        return fd


class Journal:
    """The requests to evaluate that came, as they came: repeated, they make another process a fork of this one."""

    def __init__(self, path: str, pass_on: Callable[[Frames], None]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pass_on = pass_on

    def take(self, frames: Frames) -> None:
        for kind, flags, stream, payload in frames:
            if kind == EVAL:
                os.write(self._fd, encode(kind, stream, payload, flags))
        self._pass_on(frames)
