"""Start of the agent: as PID 1 of a guest on its virtio port or vsock, or as a plain process on an inherited socket."""

from __future__ import annotations

import gc
import os
import sys

from forkd.agent.listening import ListeningPort, open_vsock, parse_vsock_port
from forkd.agent.loop import Loop
from forkd.agent.platform import Platform, Rehearsal
from forkd.agent.port import Port, open_virtio_port
from forkd.agent.server import Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_GC_THRESHOLD = 10_000  # the agent makes few cycles; the default would have it look for them all the time
_GUEST_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
}
# Ours alone: with them, a user's `python` would import the agent's package.
_PRIVATE_ENV = ("PYTHONPATH", "FORKD_AGENT_FD", "FORKD_AGENT_ROOT")


def main() -> NoReturn:
    """Without arguments: the guest's init. `--fd N --root DIR` (or FORKD_AGENT_FD, FORKD_AGENT_ROOT): a rehearsal."""
    fd, root = parse_arguments(sys.argv[1:], os.environ)
    settle()
    loop = Loop()
    loop.catch_children()
    if fd is None:
        Server(loop, open_guest_port(loop), Platform(), dict(_GUEST_ENV))
        loop.run()
    else:
        adopt_orphans()
        os.set_inheritable(fd, False)
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE_ENV}
        serve_once(loop, Port(loop, fd), Rehearsal(root), env)
    sys.exit(0)


def settle() -> None:
    """What the agent wants of its own process, wherever it runs."""
    _open_standard_descriptors()
    os.umask(0o022)
    gc.set_threshold(_GC_THRESHOLD, 50, 100)


def open_guest_port(loop: Loop) -> Port:
    """Where this guest's host is: the engine says it on the kernel's command line, or says nothing and has a port."""
    with open("/proc/cmdline") as file:
        vsock_port = parse_vsock_port(file.read())
    if vsock_port is None:
        return Port(loop, open_virtio_port())
    return ListeningPort(loop, open_vsock(vsock_port))


def serve_once(loop: Loop, port: Port, platform: Platform, env: Dict[str, str]) -> None:
    """The end of the stream is our end."""
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
    """An init may start without a console; then our first pipes must not become 0, 1 and 2."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def adopt_orphans() -> None:
    """Be to our descendants what init is to a machine's."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
