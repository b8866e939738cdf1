"""The agent as the `fake` engine runs it: on a listening socket, client after client, with its evaluations kept."""

from __future__ import annotations

import os

from forkd.agent.listening import ListeningPort
from forkd.agent.loop import Loop
from forkd.agent.main import adopt_orphans, settle
from forkd.agent.platform import Rehearsal
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
    loop = Loop()
    loop.catch_children()
    port = ListeningPort(loop, listener)
    Server(loop, port, Rehearsal(root), dict(os.environ))
    port.on_frames = Journal(journal, port.on_frames).take
    loop.run()


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
