"""The host's end of a VM's interface: a network namespace with a tap in it, what is sent there, and VMs that use it."""

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from engine_cases import Case, greet_again

from forkd.engines.base import Machine, Nic
from forkd.host import netns
from forkd.host.tap import open_tap
from forkd.model.names import new_identity
from forkd.model.network import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_PREFIX
from forkd.runtime.child import Child

T = TypeVar("T")

PATIENCE_S = 30.0
PORT = 4000
# Answers each client with its sandbox's name.
SERVE = f"""
import socket, threading
server = socket.create_server(("", {PORT}))
def serve():
    while True:
        client, _ = server.accept()
        client.recv(10)
        client.sendall(socket.gethostname().encode())
        client.close()
threading.Thread(target=serve, daemon=True).start()
"""
# Why a connection to the gateway failed.
REACH = f"""
def reach():
    try:
        socket.create_connection(("{GATEWAY_ADDRESS}", 9), 20).close()
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
"""


class Lan:
    """Reached by calls in a thread of its own, which has left our network namespace for good."""

    def __init__(self, name: str, *, by_name: bool = False) -> None:
        """`by_name`: the VMM opens the tap, and wants a header before each packet."""
        self._thread = ThreadPoolExecutor(1)
        self.name = name
        self.tap, self.namespace = self._do(lambda: self._enter(by_name))
        self.nic = Nic(self.tap, name, self.namespace)

    def connect(self, port: int, timeout_s: float = PATIENCE_S) -> socket.socket:
        return self._do(lambda: socket.create_connection((GUEST_ADDRESS, port), timeout_s))

    def listen(self) -> socket.socket:
        return self._do(lambda: socket.create_server((GATEWAY_ADDRESS, 0)))

    def received_packets(self) -> int:
        """What the guest has sent, so far."""
        said = self._do(lambda: Path("/proc/thread-self/net/dev").read_text())
        line = next(line for line in said.splitlines() if line.strip().startswith(self.name))
        return int(line.partition(":")[2].split()[1])

    async def ask(self, port: int, what: bytes = b"x") -> bytes:
        """What a server of the guest answers."""

        def exchange() -> bytes:
            with self.connect(port) as sock:
                sock.sendall(what)
                return sock.recv(100)

        return await asyncio.to_thread(exchange)

    def close(self) -> None:
        self._thread.shutdown()
        if self.tap >= 0:
            os.close(self.tap)

    def _do(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result(PATIENCE_S + 5)

    def _enter(self, by_name: bool) -> tuple[int, str]:
        netns.enter_new()
        tap = open_tap(self.name, vnet_hdr=by_name)
        if by_name:
            os.close(tap)
            tap = -1
        for command in (
            f"ip link set {self.name} address {GATEWAY_MAC} up",
            f"ip addr add {GATEWAY_ADDRESS}/{GUEST_PREFIX} dev {self.name}",
        ):
            subprocess.run(command.split(), check=True)
        return tap, f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


@contextmanager
def made_lans(count: int, *, by_name: bool = False) -> Iterator[list[Lan]]:
    lans: list[Lan] = []
    try:
        for number in range(count):
            lans.append(Lan(f"tap{number}", by_name=by_name))
        yield lans
    finally:
        for lan in lans:
            lan.close()


@asynccontextmanager
async def forked(case: Case, run: Path, name: str, nic: Nic | None) -> AsyncIterator[Child]:
    """From the snapshot's files."""
    machine = await case.engine.fork(case.frozen, run / name, nic=nic)
    child = await networked(machine, name, nic is not None, settled=True)
    try:
        yield child
    finally:
        await child.kill()


@asynccontextmanager
async def forked_live(case: Case, source: Machine, run: Path, name: str, nic: Nic | None) -> AsyncIterator[Child]:
    machine = await case.engine.fork_live(source, run / name, nic=nic)
    child = await networked(machine, name, nic is not None)
    try:
        yield child
    finally:
        await child.kill()


async def networked(machine: Machine, name: str, network: bool, *, settled: bool = False) -> Child:
    """A fork that kept the contract."""
    return await greet_again(machine, new_identity(name), settled=settled, network=network)
