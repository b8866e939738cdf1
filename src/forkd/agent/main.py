"""Start of the agent: as PID 1 of a guest on its virtio port or vsock, or as a plain process on a socket of a host."""

from __future__ import annotations

import gc
import os
import sys

from forkd.agent.changes import find_roots
from forkd.agent.loop import Loop
from forkd.agent.platform import Platform, Rehearsal
from forkd.agent.port import ListeningPort, Port, open_virtio_port, open_vsock, parse_vsock_port
from forkd.agent.server import Server
from forkd.wire.agent import EVAL, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, NoReturn

    from forkd.wire.agent import Frames

_PR_SET_CHILD_SUBREAPER = 36
_GC_THRESHOLD = 10_000  # the agent makes few cycles; with the default it would search for them all the time
_GUEST_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
}
# Not passed on: with them, a user's `python` would import the agent's package.
_PRIVATE_ENV = ("PYTHONPATH", "FORKD_AGENT_FD", "FORKD_AGENT_ROOT")


def main() -> NoReturn:
    """Without arguments: the guest's init. `--fd N --root DIR` (or FORKD_AGENT_FD, FORKD_AGENT_ROOT): on a host."""
    fd, root = parse_arguments(sys.argv[1:], os.environ)
    settle()
    loop = Loop()
    loop.catch_children()
    if fd is None:
        Server(loop, open_guest_port(loop), Platform(roots=find_roots()), dict(_GUEST_ENV))
        loop.run()
    else:
        adopt_orphans()
        os.set_inheritable(fd, False)
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE_ENV}
        serve_once(loop, Port(loop, fd), Rehearsal(root), env)
    sys.exit(0)


def settle() -> None:
    """Set up our own process, in a guest or on a host."""
    _open_standard_descriptors()
    os.umask(0o022)
    gc.set_threshold(_GC_THRESHOLD, 50, 100)


def open_guest_port(loop: Loop) -> Port:
    """The engine names a vsock port on the kernel's command line, or has a virtio port."""
    with open("/proc/cmdline") as file:
        vsock_port = parse_vsock_port(file.read())
    if vsock_port is None:
        return Port(loop, open_virtio_port())
    return ListeningPort(loop, open_vsock(vsock_port))


def serve_once(loop: Loop, port: Port, platform: Platform, env: Dict[str, str]) -> None:
    """Until the stream ends."""
    server = Server(loop, port, platform, env)
    port.on_hangup = loop.stop
    loop.run()
    server.stop()


def parse_arguments(argv: List[str], env: os._Environ[str] | Dict[str, str]) -> tuple[int | None, str]:
    fd, root = env.get("FORKD_AGENT_FD"), env.get("FORKD_AGENT_ROOT")
    rest = list(argv)
    while rest:
        option = rest.pop(0)
        if option == "--fd" and rest:
            fd = rest.pop(0)
        elif option == "--root" and rest:
            root = rest.pop(0)
        else:
            raise SystemExit("usage: forkd.agent [--fd N --root DIR]")
    if fd is None:
        return None, ""
    if root is None:
        raise SystemExit("forkd agent: --fd needs --root, a directory for the files a fork rewrites")
    return int(fd), root


def _open_standard_descriptors() -> None:
    """An init may start without a console; our first pipes must not become 0, 1 and 2."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def adopt_orphans() -> None:
    """Become the parent of orphans among our descendants, as init is in a machine."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def rehearse(listener: int, root: str, journal: str) -> None:
    """As the `fake` engine runs it: on a listening socket, client after client, until it is killed."""
    settle()
    adopt_orphans()
    loop = Loop()
    loop.catch_children()
    port = ListeningPort(loop, listener)
    Server(loop, port, Rehearsal(root), dict(os.environ))
    port.on_frames = Journal(journal, port.on_frames).take
    loop.run()


class Journal:
    """Records the requests to evaluate: repeated in another process, they make it a fork of this one."""

    def __init__(self, path: str, pass_on: Callable[[Frames], None]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pass_on = pass_on

    def take(self, frames: Frames) -> None:
        for kind, flags, stream, payload in frames:
            if kind == EVAL:
                os.write(self._fd, encode(kind, stream, payload, flags))
        self._pass_on(frames)


if __name__ == "__main__":
    main()
