"""Clients that vanish, come back, or do not speak the protocol."""

import asyncio
import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest
from rehearsed import Guest
from support_processes import is_reaped, wait_until

from forkd.guest.agent import Agent
from forkd.wire.agent import (
    CALL,
    DATA,
    EVAL,
    EXEC,
    FAIL,
    HELLO,
    MAX_PAYLOAD,
    MAX_STREAMS,
    MORE,
    NOISE,
    REPLY,
    STARTED,
    WINDOW,
    WINDOW_BYTES,
    Parser,
    decode_json,
    encode,
    encode_json,
    encode_window,
    pack_eval,
)


class RawClient:
    """Speaks frames, or worse, over the guest's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._parser = Parser()
        self._frames: list[tuple[int, int, int, bytes]] = []

    def send(self, data: bytes) -> None:
        self.sock.setblocking(True)
        self.sock.sendall(data)

    def receive(self, kind: int, within_s: float = 5.0) -> tuple[int, int, int, bytes]:
        """The next frame of this kind; others before it are dropped."""
        deadline = time.monotonic() + within_s
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame[0] == kind:
                    return frame
            ready, _, _ = select.select([self.sock], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no frame of kind {kind}"
            data = self.sock.recv(1 << 20)
            assert data, "the agent hung up"
            self._frames += self._parser.feed(data)

    def hello(self, session: str = "s") -> None:
        self.send(encode_json(HELLO, 9, {"session": session}))
        assert decode_json(self.receive(HELLO)[3])["session"] == session


@pytest.fixture
def client(guest: Guest) -> RawClient:
    return RawClient(guest.sock)


def start_sleeper(client: RawClient, number: int = 1) -> int:
    client.send(encode_json(EXEC, number, {"argv": ["sleep", "60"], "stdin": True}))
    pid = decode_json(client.receive(STARTED)[3])["pid"]
    assert isinstance(pid, int)
    return pid


def test_a_new_session_ends_the_commands_of_the_old_one(client: RawClient) -> None:
    client.hello("one")
    pid = start_sleeper(client)
    client.hello("one")
    assert Path(f"/proc/{pid}").exists()
    client.hello("two")
    wait_until(lambda: is_reaped(pid))


def test_a_new_session_interrupts_the_evaluation_of_the_old_one(client: RawClient) -> None:
    client.hello("one")
    client.send(encode(EVAL, 1, pack_eval(b"import time; time.sleep(60)", 0)))
    client.hello("two")
    client.send(encode(EVAL, 2, pack_eval(b"1 + 1", 0)))
    _, _, stream, payload = client.receive(REPLY)
    assert stream == 2 and decode_json(payload)["value"] == 2


async def test_a_half_sent_frame_of_a_vanished_client_does_not_block_the_next(client: RawClient, guest: Guest) -> None:
    client.hello()
    for kind in (DATA, CALL):
        client.send(encode(kind, 1, bytes(MAX_PAYLOAD))[:1000])
        started = time.monotonic()
        async with guest.connected() as agent:
            assert (await agent.eval("1")).value == 1
        assert time.monotonic() - started < 5


def test_a_half_sent_message_of_a_vanished_client_does_not_block_the_next(client: RawClient) -> None:
    client.send(encode(EVAL, 1, bytes(MAX_PAYLOAD), MORE))
    client.hello("two")


def test_garbage_is_skipped_and_reported(client: RawClient) -> None:
    garbage = b"\xf0\x6b" * 100 + b"hello?" * 1000
    client.send(garbage + encode_json(HELLO, 5, {"session": "x"}))
    skipped = decode_json(client.receive(NOISE)[3])["skipped"]
    assert decode_json(client.receive(HELLO)[3])["session"] == "x"
    assert skipped <= len(garbage)


def test_requests_that_make_no_sense_are_refused_one_by_one(client: RawClient) -> None:
    client.hello()
    for kind, payload in [
        (CALL, b"not json"),
        (CALL, b"[]"),
        (CALL, b"{}"),
        (CALL, b'{"op": 5}'),
        (CALL, b'{"op": "nonsense"}'),
        (CALL, b'{"op": "stat"}'),
        (CALL, b'{"op": "stat", "path": {}}'),
        (CALL, b'{"op": "list", "path": "/", "limit": -1}'),
        (CALL, b'{"op": "read", "path": "/etc/passwd", "offset": "x"}'),
        (CALL, b'{"op": "write", "path": "/"}'),
        (CALL, b'{"op": "mkdir", "path": "/x", "mode": "rwx"}'),
        (EXEC, b'{"argv": []}'),
        (EXEC, b'{"argv": "text"}'),
        (EXEC, b'{"argv": [1]}'),
        (EXEC, b'{"argv": ["x"], "env": {"A": 1}}'),
        (EXEC, b'{"argv": ["x"], "pty": {"rows": 0, "cols": 1}}'),
        (EXEC, b'{"argv": ["x"], "user": "nobody-by-this-name"}'),
        (EVAL, b""),
        (HELLO, b"{}"),
    ]:
        client.send(encode(kind, 77, payload))
        assert client.receive(FAIL)[2] == 77
    client.hello()


def test_frames_for_streams_that_are_gone_are_ignored(client: RawClient) -> None:
    for kind in range(8, 15):
        client.send(encode(kind, 55, bytes(8) if kind == 14 else b"{}\0\0" if kind == WINDOW else b"{}"))
    client.hello()


def test_a_message_that_is_too_large_is_refused(client: RawClient) -> None:
    for _ in range(40):
        client.send(encode(EVAL, 3, bytes(MAX_PAYLOAD), MORE))
    client.send(encode(EVAL, 3, b""))
    assert client.receive(FAIL)[2] == 3
    client.hello()


def test_too_many_streams_are_refused_with_their_code(client: RawClient) -> None:
    for number in range(1, MAX_STREAMS + 1):
        start_sleeper(client, number)
    client.send(encode_json(EXEC, 500, {"argv": ["true"]}))
    _, _, stream, payload = client.receive(FAIL)
    assert stream == 500 and decode_json(payload)["code"] == "too_many"
    client.hello("another")
    client.send(encode_json(EXEC, 501, {"argv": ["true"]}))
    assert client.receive(REPLY)[2] == 501


def test_a_window_opened_too_wide_ends_the_stream(client: RawClient) -> None:
    pid = start_sleeper(client)
    client.send(encode_window(1, 1))
    assert client.receive(FAIL)[2] == 1
    wait_until(lambda: is_reaped(pid))


def test_more_input_than_granted_ends_the_command(client: RawClient) -> None:
    # The program's pipe takes, and so grants again, a first 64 KiB.
    pid = start_sleeper(client)
    for _ in range(WINDOW_BYTES // MAX_PAYLOAD + 2):
        client.send(encode(DATA, 1, bytes(MAX_PAYLOAD)))
    wait_until(lambda: is_reaped(pid))


def test_the_agent_never_sends_more_than_was_granted(client: RawClient) -> None:
    client.send(encode_json(EXEC, 1, {"shell": "cat /dev/zero"}))
    received = 0
    while received < WINDOW_BYTES:
        received += len(client.receive(DATA)[3])
    assert received == WINDOW_BYTES
    ready, _, _ = select.select([client.sock], [], [], 0.3)
    assert not ready
    client.send(encode_window(1, 1000))
    assert len(client.receive(DATA)[3]) == 1000


async def test_an_idle_agent_sleeps(agent: Agent) -> None:
    await agent.eval("1")
    info = await agent.ping()
    # How long it takes to come to rest is the machine's affair; one that polls never does.
    async with asyncio.timeout(10):
        before, after = [""], ["?"]
        while after != before:
            before = [context_switches(pid) for pid in (info.pid, info.interpreter_pid)]
            await asyncio.sleep(0.5)
            after = [context_switches(pid) for pid in (info.pid, info.interpreter_pid)]


def context_switches(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_an_interrupt_does_not_end_the_agent(client: RawClient, guest: Guest) -> None:
    client.hello()
    os.kill(guest.process.pid, signal.SIGINT)
    client.hello()


def test_the_agent_ends_with_its_stream_and_takes_everything_along(client: RawClient, guest: Guest) -> None:
    client.hello()
    pid = start_sleeper(client)
    client.send(encode(EVAL, 2, pack_eval(b"while True: pass", 0)))
    guest.sock.close()
    guest.process.wait(10)
    wait_until(lambda: is_reaped(pid))
    assert os.WEXITSTATUS(guest.process.returncode) == 0
