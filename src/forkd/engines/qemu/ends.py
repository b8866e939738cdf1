"""What a QEMU is reached by, its sockets and logs: those of a fork, and which of its source's they replace."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Nic
from forkd.engines.machine import AGENT_SOCKET, CONSOLE, connected_socket, listening_socket
from forkd.engines.qemu.machine import VMM_LOG
from forkd.engines.qemu.monitor import QMP_SOCKET
from forkd.engines.qemu.nic import TAP, open_end
from forkd.host.procfork.descriptors import Action, Choice, Descriptor, Ours

AGENT = "agent"
# What its sockets are for, by the names of their files.
ROLES = {AGENT_SOCKET: AGENT, QMP_SOCKET: "monitor"}
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
    tap: int
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
            TAP: self.tap,
        }


def render_choice(source: Path, roles: Mapping[str, str], tap: int | None = None) -> Choice:
    """`tap`: the number of its network interface, whatever is there now."""
    names = {**roles, str(source / CONSOLE): "console", str(source / VMM_LOG): "log"}

    def choose(descriptor: Descriptor) -> Action | None:
        name = TAP if descriptor.number == tap else names.get(descriptor.link)
        return None if name is None else Ours(name)

    return choose


@contextlib.contextmanager
def opened_ends(directory: Path, nic: Nic | None = None, *, served: bool) -> Iterator[Ends]:
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
        tap = open_end(nic)
        theirs.callback(os.close, tap)
        yield Ends(agent_listener, agent, monitor_listener, monitor, console, log, tap, channel, control)
        on_failure.pop_all()


def _cut_off() -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.close()
    return theirs


def _opened(path: Path, closed_by: contextlib.ExitStack) -> int:
    fd = os.open(path, _LOG_FLAGS, 0o600)
    closed_by.callback(os.close, fd)
    return fd
