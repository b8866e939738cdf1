"""What a QEMU is reached by, its sockets and logs: those of a fork, and which of its source's they replace."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.machine import AGENT_SOCKET, CONSOLE, connected_socket, listening_socket
from forkd.engines.qemu.machine import VMM_LOG
from forkd.engines.qemu.monitor import QMP_SOCKET
from forkd.errors import NotForkable
from forkd.host.procfork.descriptors import Action, Choice, Descriptor, Ours
from forkd.host.procfork.ptrace import take_descriptor

AGENT = "agent"
_SO_ACCEPTCONN = 30
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


@dataclass(frozen=True)
class Ends:
    """What a VM is reached by: its ends go into the fork, `channel` (to the agent) and `control` are ours."""

    agent_listener: socket.socket
    agent: socket.socket
    monitor_listener: socket.socket
    monitor: socket.socket
    console: int
    log: int
    channel: socket.socket
    control: socket.socket

    def by_name(self) -> dict[str, int]:
        return {
            "agent listener": self.agent_listener.fileno(),
            AGENT: self.agent.fileno(),
            "monitor listener": self.monitor_listener.fileno(),
            "monitor": self.monitor.fileno(),
            "console": self.console,
            "log": self.log,
        }


def render_choice(source: Path, roles: Mapping[str, str]) -> Choice:
    names = {**roles, str(source / CONSOLE): "console", str(source / VMM_LOG): "log"}

    def choose(descriptor: Descriptor) -> Action | None:
        name = names.get(descriptor.link)
        return None if name is None else Ours(name)

    return choose


@contextlib.contextmanager
def opened_ends(directory: Path, *, served: bool) -> Iterator[Ends]:
    """All but `channel` and `control` are closed when the block has ended; these too when it failed.

    `served`: the source's agent has a client, in whose place the fork finds ours. Its stream goes on where it is: had
    it been cut, what is under way in the guest and in QEMU would be lost in part, and a QEMU that was writing to it
    just then may never write again. Otherwise ours waits to be served.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
        agent_listener = theirs.enter_context(listening_socket(directory / AGENT_SOCKET))
        monitor_listener = theirs.enter_context(listening_socket(directory / QMP_SOCKET))
        channel = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET))
        control = on_failure.enter_context(connected_socket(directory / QMP_SOCKET))
        monitor = theirs.enter_context(monitor_listener.accept()[0])
        agent = theirs.enter_context(agent_listener.accept()[0] if served else _cut_off())
        for sock in (monitor, agent):
            sock.setblocking(False)
        console = _opened(directory / CONSOLE, theirs)
        log = _opened(directory / VMM_LOG, theirs)
        yield Ends(agent_listener, agent, monitor_listener, monitor, console, log, channel, control)
        on_failure.pop_all()


def _cut_off() -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.close()
    return theirs


def _opened(path: Path, closed_by: contextlib.ExitStack) -> int:
    fd = os.open(path, _LOG_FLAGS, 0o600)
    closed_by.callback(os.close, fd)
    return fd


def find_roles(pid: int) -> dict[str, str]:
    """What the sockets of a QEMU are for, by the links under which /proc shows them."""
    roles: dict[str, str] = {}
    with contextlib.ExitStack() as opened:
        try:
            pidfd = os.pidfd_open(pid)
            opened.callback(os.close, pidfd)
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                link = str(entry.readlink())
                if link.startswith("socket:"):
                    with socket.socket(fileno=take_descriptor(pidfd, int(entry.name))) as sock:
                        role = _role(sock)
                    if role is not None:
                        roles[link] = role
        except OSError as error:
            raise NotForkable(f"The sockets of process {pid} cannot be looked at: {error.strerror}") from error
    return roles


def _role(sock: socket.socket) -> str | None:
    if sock.family != socket.AF_UNIX:
        return None
    listener = " listener" if sock.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN) else ""
    names = {AGENT_SOCKET: AGENT, QMP_SOCKET: "monitor"}
    name = names.get(Path(sock.getsockname() or "").name)
    return name + listener if name else None
