"""Each sandbox's port: forkd's guest protocol over a real agent, for root and the daemon's own user only."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forkd.errors import Conflict, InvalidInput, NotFound
from forkd.guest import agent as agent_module
from forkd.guest.agent import Agent
from forkd.guest.budget import GUEST_BYTES
from forkd.host import peer
from forkd.host.peer import find_owner, find_peer_uid, parse_answer, parse_table, render_question
from forkd.runtime import ports as module
from forkd.runtime.ports import HOST, AgentPorts

pytestmark = pytest.mark.usefixtures("nothing_left")

_NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@dataclass
class Live:
    agent: Agent


@pytest.fixture
async def ports(agent: Agent) -> AsyncIterator[AgentPorts]:
    """Ports that lead to one real agent; any sandbox but `gone` is there."""

    @contextlib.asynccontextmanager
    async def use(sandbox_id: str) -> AsyncIterator[Live]:
        if sandbox_id == "gone":
            raise NotFound("There is no sandbox gone", hint="List them")
        yield Live(agent)

    ports = AgentPorts(use)
    yield ports
    ports.close_all()


async def ask(port: int, request: bytes, *, half_close: bool = True) -> bytes:
    """What comes until the port closes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        if half_close:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def call(port: int, **request: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await ask(port, json.dumps(request).encode() + b"\n"))
    return answer


async def test_ping_exec_and_eval_answer_with_the_keys_of_forkd(ports: AgentPorts, agent: Agent) -> None:
    port = ports.open("a")
    pong = await call(port, action="ping")
    assert pong.pop("pid") == (await agent.ping()).pid
    assert isinstance(pong.pop("numpy_version"), str)
    assert pong == {"pong": True, "agent_lang": "python", "warmup_ready": True}
    ran = await call(port, action="exec", args=["sh", "-c", "echo $((6*7)); echo no >&2; exit 5"], timeout=30)
    assert ran == {"stdout": "42\n", "stderr": "no\n", "exit_code": 5}
    killed = await call(port, action="exec", args=["sh", "-c", "kill -9 $$"])
    assert killed == {"stdout": "", "stderr": "", "exit_code": -9}
    assert await call(port, action="eval", code="sum(range(10))") == {"result": "45", "exit_code": 0}
    raised = await call(port, action="eval", code="1/0")
    assert raised.pop("traceback").startswith("Traceback")
    assert raised == {"error": "ZeroDivisionError: division by zero", "exit_code": 1}


async def test_a_command_that_times_out_or_cannot_start_is_an_error_not_empty_output(ports: AgentPorts) -> None:
    port = ports.open("a")
    late = await call(port, action="exec", args=["sleep", "100"], timeout=0.1)
    assert late.keys() == {"error", "traceback", "exit_code"}
    assert late["error"] == "GuestTimeout: The command did not end within 0.1 s and was killed"
    absent = await call(port, action="exec", args=["/nonexistent"])
    assert absent.keys() == {"error", "traceback", "exit_code"}
    assert absent["error"].startswith("CommandNotStarted: ")


async def test_output_of_any_size_comes_whole_and_is_kept_no_longer(ports: AgentPorts, agent: Agent) -> None:
    size = 3_000_000
    answer = await call(ports.open("a"), action="exec", args=["head", "-c", str(size), "/dev/zero"])
    assert answer == {"stdout": "\0" * size, "stderr": "", "exit_code": 0}
    async with asyncio.timeout(10):
        while agent.channel.budget.free_bytes < GUEST_BYTES:
            await asyncio.sleep(0.01)


async def test_code_that_takes_too_long_is_an_error(ports: AgentPorts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVAL_S", 0.2)
    late = await call(ports.open("a"), action="eval", code="__import__('time').sleep(100)")
    assert late == {"error": "GuestTimeout: The code did not end within 0.2 s", "traceback": "", "exit_code": 1}


async def test_the_version_of_numpy_is_asked_for_once_and_not_while_the_interpreter_is_busy(
    ports: AgentPorts, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "ASK_NUMPY_S", 0.2)
    port = ports.open("a")
    await agent.eval("import sys, types; sys.modules['numpy'] = types.SimpleNamespace(__version__='9.8.7')")
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n'waited'"
    busy = asyncio.create_task(agent.eval(wait))
    await asyncio.sleep(0)  # it is on its way, before the ping
    assert (await call(port, action="ping"))["numpy_version"] == "unknown"
    (tmp_path / "go").touch()
    assert (await busy).value == "waited", "a ping must not interrupt what runs"
    assert (await call(port, action="ping"))["numpy_version"] == "9.8.7"
    await agent.eval("sys.modules['numpy'].__version__ = 'other'")
    assert (await call(port, action="ping"))["numpy_version"] == "9.8.7"
    assert await Agent(agent.channel, agent.session).numpy_version() == "other", "each agent asks for itself"


async def test_a_guest_without_numpy_says_not_installed(ports: AgentPorts, agent: Agent) -> None:
    await agent.eval("import sys; sys.modules.pop('numpy', None); sys.path[:] = ['', '/nonexistent']")
    assert (await call(ports.open("a"), action="ping"))["numpy_version"] == "not-installed"


@pytest.mark.parametrize(
    "request_line",
    [b"", b"\n", b"{\n", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b'{"action": "dance"}\n', b"x" * (1024 * 1024 + 1)],
)
async def test_a_bad_request_is_answered_and_closed(ports: AgentPorts, request_line: bytes) -> None:
    answer = json.loads(await ask(ports.open("a"), request_line))
    assert answer.keys() == {"error", "traceback", "exit_code"}
    assert answer["error"].startswith("InvalidInput: ")
    assert answer["exit_code"] == 1


async def test_a_client_need_not_half_close_nor_end_its_line_and_what_follows_the_line_is_ignored(
    ports: AgentPorts,
) -> None:
    port = ports.open("a")
    assert json.loads(await ask(port, b'{"action": "eval", "code": "1"}\n', half_close=False))["result"] == "1"
    assert json.loads(await ask(port, b'{"action": "eval", "code": "2"}'))["result"] == "2"
    more = b'{"action": "eval", "code": "3"}\n' * 10_000
    assert json.loads(await ask(port, more))["result"] == "3"


async def test_a_client_that_sends_nothing_is_answered_at_its_deadline(
    ports: AgentPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.1)
    answer = json.loads(await ask(ports.open("a"), b'{"action":', half_close=False))
    assert answer["error"] == "InvalidInput: No complete request arrived within 0.1 s"


async def test_a_sandbox_that_cannot_answer_is_an_error_reply(ports: AgentPorts, agent: Agent) -> None:
    answer = await call(ports.open("gone"), action="ping")
    assert answer["error"] == "NotFound: There is no sandbox gone"
    port = ports.open("a")
    agent.close()
    assert (await call(port, action="ping"))["error"].startswith("ChannelClosed: ")


async def test_more_connections_than_allowed_are_told_so_and_the_port_recovers(
    ports: AgentPorts, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SERVED", 3)
    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 5)
    port = ports.open("a")
    wait = ["sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"]
    slow = [asyncio.create_task(call(port, action="exec", args=wait)) for _ in range(3)]
    while (await agent.ping()).streams < 3:
        await asyncio.sleep(0.01)
    refused = await asyncio.gather(*(call(port, action="ping") for _ in range(20)))
    assert all(answer["error"].startswith("NoCapacity: ") for answer in refused)
    (tmp_path / "go").touch()
    assert [answer["exit_code"] for answer in await asyncio.gather(*slow)] == [0, 0, 0]
    assert (await call(port, action="ping"))["pong"] is True


async def test_closing_a_port_answers_who_is_there_and_frees_the_port(ports: AgentPorts, agent: Agent) -> None:
    port = ports.open("a")
    waiting = asyncio.create_task(call(port, action="exec", args=["sleep", "100"]))
    while (await agent.ping()).streams < 1:
        await asyncio.sleep(0.01)
    ports.close("a")
    ports.close("a")
    assert (await waiting)["error"] == "NotRunning: Sandbox a is gone"
    with pytest.raises(ConnectionRefusedError):
        await ask(port, b"\n")
    assert ports.open("a", port) == port, "although connections to it were there a moment ago"
    while (await agent.ping()).streams > 0:  # the command is ended too
        await asyncio.sleep(0.01)


async def test_a_port_that_is_taken_or_none_is_refused(ports: AgentPorts) -> None:
    port = ports.open("a")
    with pytest.raises(Conflict, match=f"Port {port} is taken"):
        ports.open("b", port)
    with pytest.raises(Conflict, match="has a port already"):
        ports.open("a")
    with pytest.raises(InvalidInput):
        ports.open("b", 65536)
    assert ports.open("b") != port


async def test_a_port_that_is_only_taken_refuses_connections_until_it_serves(ports: AgentPorts) -> None:
    port = ports.open("a", serve=False)
    with pytest.raises(ConnectionRefusedError):
        await ask(port, b"\n")
    with pytest.raises(Conflict):
        ports.open("b", port)
    ports.serve("a")
    assert (await call(port, action="ping"))["pong"] is True
    ports.close("a")
    assert ports.open("a", port, serve=False) == port, "over connections that are not forgotten yet"
    with pytest.raises(Conflict):
        ports.open("b", port, serve=False)


async def test_running_out_of_descriptors_delays_a_connection_and_does_not_lose_it(
    ports: AgentPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ACCEPT_RETRY_S", 0.05)
    port = ports.open("a")
    failures = iter([errno.EMFILE] * 3)
    accept = socket.socket.accept

    def failing(sock: socket.socket) -> object:
        for code in failures:
            raise OSError(code, os.strerror(code))
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    assert (await call(port, action="eval", code="1"))["result"] == "1"
    assert next(failures, None) is None


async def test_ports_cost_little(ports: AgentPorts) -> None:
    tasks, threads = len(asyncio.all_tasks()), len(os.listdir("/proc/self/task"))
    opened = [ports.open(f"sb-{number}") for number in range(100)]
    assert len(set(opened)) == 100
    assert (len(asyncio.all_tasks()), len(os.listdir("/proc/self/task"))) == (tasks, threads)
    ports.close_all()


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def connected(uid: int | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Client, then server."""
    with socket.create_server((HOST, 0)) as listener:
        with acting_as(uid) if uid is not None else contextlib.nullcontext():
            client = socket.create_connection(listener.getsockname())
        with client:
            server, _ = listener.accept()
            with server:
                yield client, server


def ask_as_nobody(port: int, proof: Path) -> socket.socket:
    """A connection that has asked for a command, which would make a file."""
    with acting_as(_NOBODY):
        connection = socket.create_connection((HOST, port))
    connection.sendall(json.dumps({"action": "exec", "args": ["touch", str(proof)]}).encode() + b"\n")
    return connection


@needs_root
async def test_another_user_is_refused_with_an_answer_and_nothing_is_run(ports: AgentPorts, tmp_path: Path) -> None:
    connection = ask_as_nobody(ports.open("a"), tmp_path / "proof")
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write_eof()
    answer = json.loads(await reader.read())
    writer.close()
    assert answer["error"] == "Unauthorized: This port serves root and the user of the daemon"
    assert not (tmp_path / "proof").exists()


@needs_root
async def test_a_client_that_closed_before_it_was_looked_at_is_nobody(ports: AgentPorts, tmp_path: Path) -> None:
    """The kernel reports such a socket as root's."""
    port = ports.open("a")
    ask_as_nobody(port, tmp_path / "proof").close()
    time.sleep(0.05)  # the port has had no chance to accept it yet
    await asyncio.sleep(0.1)
    await call(port, action="ping")
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("uid", [None, os.geteuid() + 1])
async def test_an_unknown_or_another_user_is_refused(uid: int | None) -> None:
    @contextlib.asynccontextmanager
    async def use(sandbox_id: str) -> AsyncIterator[Live]:
        pytest.fail("the sandbox was used")
        yield

    ports = AgentPorts(use, lambda _: uid)
    try:
        assert (await call(ports.open("a"), action="ping"))["error"].startswith("Unauthorized: ")
    finally:
        ports.close_all()


def test_the_owner_of_a_connection_is_found_until_it_is_closed() -> None:
    with connected() as (client, server):
        addresses = client.getsockname(), server.getsockname()
        assert find_peer_uid(server) == find_owner(*addresses) == os.geteuid()
        client.shutdown(socket.SHUT_WR)
        assert find_peer_uid(server) == os.geteuid()
        client.close()
        assert find_peer_uid(server) is None
        assert find_owner(*addresses) is None
    with connected() as (client, server):
        server.close()
        assert find_peer_uid(server) is None


@needs_root
def test_netlink_and_proc_agree_about_the_owner() -> None:
    for uid in (0, _NOBODY):
        with connected(uid) as (client, server):
            local, remote = client.getsockname(), server.getsockname()
            with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, peer._NETLINK_SOCK_DIAG) as netlink:
                netlink.sendto(render_question(local, remote), (0, 0))
                assert parse_answer(netlink.recv(4096)) == uid
            assert parse_table(Path("/proc/net/tcp").read_text(), local, remote) == uid


def test_without_netlink_proc_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "no netlink here")

    monkeypatch.setattr(peer, "_ask_kernel", refuse)
    with connected() as (client, server):
        assert find_peer_uid(server) == os.geteuid()
        client.close()
        assert find_peer_uid(server) is None


@pytest.mark.parametrize("answer", [b"", b"\0" * 20, render_question((HOST, 1), (HOST, 2))[:40]])
def test_what_is_no_answer_of_the_kernel_names_nobody(answer: bytes) -> None:
    with pytest.raises(OSError):
        parse_answer(answer)
