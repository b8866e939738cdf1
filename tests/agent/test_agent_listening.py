"""The agent on a listening socket: a vsock in a guest, a unix socket here."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.agent.loop import Loop
from forkd.agent.port import ListeningPort, is_host, open_vsock, parse_vsock_port
from forkd.guest.agent import Agent
from forkd.wire.agent import CALL, EXEC, HELLO, REPLY, Parser, encode_json

_START = "import sys; from forkd.agent.main import rehearse; rehearse(int(sys.argv[1]), *sys.argv[2:])"
_EXIT_S = 10.0
PING = {"op": "ping"}


@pytest.fixture
def address(guest_lib: Path, tmp_path: Path) -> Iterator[str]:
    """Where an agent listens that had no client yet."""
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(listener.fileno()), str(tmp_path / "root"), str(tmp_path / "journal")],
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": str(guest_lib), "HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    yield path
    was_alive = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    _, complaints = process.communicate(timeout=_EXIT_S)
    assert was_alive and complaints == b""


def connect(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client


async def test_an_agent_waits_for_its_first_client_and_serves_the_next_when_it_has_gone(address: str) -> None:
    time.sleep(0.3)  # it has started by now, and has nobody to serve
    first = await Agent.connect(connect(address))
    second = connect(address)
    waiting = asyncio.create_task(Agent.connect(second))
    assert (await first.eval("kept = 41\nkept")).value == 41
    await asyncio.sleep(0.2)
    assert not waiting.done()
    first.close()
    agent = await waiting
    assert (await agent.eval("kept + 1")).value == 42
    agent.close()


async def test_clients_that_go_at_once_are_survived(address: str) -> None:
    for _ in range(20):
        connect(address).close()
    agent = await Agent.connect(connect(address))
    assert (await agent.eval("6 * 7")).value == 42
    agent.close()


class Gone:
    """A listener whose client is gone when it is accepted, as vsock's may be."""

    def __init__(self, listener: socket.socket, error: OSError) -> None:
        self._listener = listener
        self._error: OSError | None = error

    def fileno(self) -> int:
        return self._listener.fileno()

    def _accept(self) -> tuple[int, object]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        sock, address = self._listener.accept()
        return sock.detach(), address


@pytest.mark.parametrize("error", [ConnectionResetError(), ConnectionAbortedError(), BlockingIOError()])
def test_a_client_that_is_gone_when_it_is_accepted_does_not_keep_out_the_next(tmp_path: Path, error: OSError) -> None:
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        loop = Loop()
        port = ListeningPort(loop, os.dup(listener.fileno()))
        port._listener.close()
        port._listener = Gone(listener, error)  # type: ignore[assignment]
        port._on_client(0)
        assert port.broken and port.send(b"lost") == 0
        with connect(path) as client:
            port._on_client(0)
            assert not port.broken and port.send(b"said") == 4
            assert client.recv(9) == b"said"
        port.close()
        loop.epoll.close()


def test_the_kernel_command_line_says_where_to_listen() -> None:
    assert parse_vsock_port("console=ttyS0 quiet\n") is None
    assert parse_vsock_port("") is None
    assert parse_vsock_port("quiet forkd.agent=vsock:1024 panic=-1\n") == 1024
    assert parse_vsock_port("forkd.agent=vsock:1 forkd.agent=vsock:2") == 2
    assert parse_vsock_port("forkd.agents=what xforkd.agent=what") is None


@pytest.mark.parametrize(
    "value",
    ["", "1024", "vsock", "vsock:", "vsock:x", "vsock:-1", "vsock:\u00b2", "tcp:1024", "vsock:4294967295"],
)
def test_a_command_line_that_makes_no_sense_ends_the_agent_with_a_word(value: str) -> None:
    with pytest.raises(SystemExit, match=f"^forkd agent: forkd.agent={value} is not forkd.agent=vsock:<port>$"):
        parse_vsock_port(f"quiet forkd.agent={value}")


def test_of_vsock_clients_only_the_host_is_served() -> None:
    assert is_host((socket.VMADDR_CID_HOST, 1025))
    assert not is_host((1, 1025)) and not is_host((3, 1025))
    assert is_host("") and is_host(b"\0abstract")


@pytest.fixture
def vsock_port() -> int:
    """One that nobody listens on."""
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as free:
            free.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
            return int(free.getsockname()[1])
    except OSError as error:
        pytest.skip(f"no AF_VSOCK here: {error}")


def test_a_vsock_listens_on_its_port_whatever_the_address(vsock_port: int) -> None:
    with socket.socket(fileno=open_vsock(vsock_port)) as listener:
        assert listener.getsockname() == (socket.VMADDR_CID_ANY, vsock_port)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        with pytest.raises(SystemExit, match=f"^forkd agent: cannot listen on vsock port {vsock_port}: .*in use"):
            open_vsock(vsock_port)


def test_a_local_user_of_a_guest_with_a_vsock_loopback_is_hung_up_on(vsock_port: int) -> None:
    loop = Loop()
    port = ListeningPort(loop, open_vsock(vsock_port))
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as client:
            client.settimeout(2)
            try:
                client.connect((1, vsock_port))  # VMADDR_CID_LOCAL
            except OSError as error:
                pytest.skip(f"no vsock_loopback here: {error}")
            port._on_client(0)
            assert port.broken and client.recv(1) == b""
    finally:
        port._listener.close()
        loop.epoll.close()


async def test_what_a_client_sent_is_not_answered_once_it_has_left(address: str, tmp_path: Path) -> None:
    """Its frames may reach the agent after it has gone; only a greeting starts the next session."""
    (await Agent.connect(connect(address))).close()
    with connect(address) as late:
        late.sendall(encode_json(EXEC, 3, {"argv": ["touch", str(tmp_path / "late")]}) + encode_json(CALL, 4, PING))
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.recv(1)
        late.sendall(encode_json(HELLO, 5, {"session": "next"}) + encode_json(CALL, 6, PING))
        late.settimeout(5)
        parser, answered = Parser(), []
        while len(answered) < 2:
            answered += [(kind, stream) for kind, _, stream, _ in parser.feed(late.recv(65536))]
    assert answered == [(HELLO, 5), (REPLY, 6)] and not (tmp_path / "late").exists()
