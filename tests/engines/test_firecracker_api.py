"""Firecracker's API over its socket: against a server that misbehaves in every way, and the real one."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support_freeze import NO_IMAGE

from forkd.engines.firecracker.api import MAX_BODY_BYTES, MAX_HEAD_BYTES, Api
from forkd.engines.firecracker.plan import Call, parse_paused, render_boot, render_load, render_look
from forkd.engines.machine import connected_socket
from forkd.errors import EngineFailed
from forkd.host.firecracker import ask_version
from forkd.model.machine import MachineSpec

pytestmark = pytest.mark.usefixtures("nothing_left")

CALL = Call("PUT", "/machine-config", {"vcpu_count": 1})
HASTY = Call("PUT", "/machine-config", {"vcpu_count": 1}, deadline_s=0.2)
_EXIT_S = 10.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(place: Path, serve: Serve) -> AsyncIterator[Api]:
    """An API whose other end is `serve`, once for each connection."""
    tasks: list[asyncio.Task[None]] = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, EOFError):
            pass  # the client gave up
        finally:
            writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(run(reader, writer)))

    server = await asyncio.start_unix_server(accept, place)
    api = Api(place)
    try:
        yield api
    finally:
        await api.close()
        server.close()
        await server.wait_closed()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, object]:
    """The first line and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *fields = head.rstrip().split("\r\n")
    lengths = [int(field.partition(":")[2]) for field in fields if field.lower().startswith("content-length:")]
    body = await reader.readexactly(lengths[0]) if lengths else b"null"
    return first, json.loads(body)


def render_answer(status: str, answer: object = None) -> bytes:
    body = b"" if answer is None else json.dumps(answer).encode()
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"HTTP/1.1 {status}\r\nServer: Firecracker API\r\n{length}\r\n".encode() + body


def answering(*answers: bytes) -> Serve:
    """One answer for each request, then a hang-up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()

    return serve


async def ask(place: Path, serve: Serve, call: Call = CALL) -> object:
    async with served(place, serve) as api:
        return await api.call(call)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "api.sock"


async def test_calls_go_as_http_and_come_back_as_json_over_one_connection(place: Path) -> None:
    seen: list[list[tuple[str, object]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append([])
        while True:
            seen[-1].append(await read_request(reader))
            if len(seen[-1]) == 2:
                writer.write(render_answer("200 ", {"state": "Running", "name": "ümlaut"}))
            else:
                writer.write(render_answer("204 "))

    async with served(place, serve) as api:
        assert await api.call(CALL) is None
        assert await api.call(render_look()) == {"state": "Running", "name": "ümlaut"}
        assert await api.call(Call("PATCH", "/vm", {"state": "Paused"})) is None
    assert seen == [
        [
            ("PUT /machine-config HTTP/1.1", {"vcpu_count": 1}),
            ("GET / HTTP/1.1", None),
            ("PATCH /vm HTTP/1.1", {"state": "Paused"}),
        ]
    ]


async def test_an_answer_that_comes_in_drips_is_put_together(place: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in render_answer("200 OK", {"state": "Running"}):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    assert await ask(place, serve) == {"state": "Running"}


async def test_a_refusal_has_firecrackers_own_words_and_the_connection_stays(place: Path) -> None:
    answers = [
        render_answer("400 Bad Request", {"fault_message": "The vCPU number is \x1b[2Jinvalid!\n"}),
        render_answer("204 No Content"),
    ]
    async with served(place, answering(*answers)) as api:
        with pytest.raises(EngineFailed) as caught:
            await api.call(CALL)
        assert caught.value.message == "Firecracker refused PUT /machine-config: The vCPU number is  [2Jinvalid!"
        assert await api.call(CALL) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (render_answer("400 "), "status 400"),
        (render_answer("500 ", {"fault_message": 5}), "status 500"),
        (render_answer("404 ", ["what"]), "status 404"),
        (b"HTTP/1.1 403 \r\nContent-Length: 4\r\n\r\nwhat", "status 403"),
        (render_answer("400 ", {"fault_message": "x" * 60_000}), "x" * 500 + "..."),
    ],
)
async def test_a_refusal_is_told_whatever_comes_with_it(place: Path, answer: bytes, told: str) -> None:
    with pytest.raises(EngineFailed) as caught:
        await ask(place, answering(answer))
    assert caught.value.message == f"Firecracker refused PUT /machine-config: {told}"


@pytest.mark.parametrize(
    "answers",
    [(), (b"",), (b"HTTP/1.1 2",), (render_answer("200 ", {"state": "Running"})[:-1],)],
    ids=["before the request", "before the answer", "in its head", "in its body"],
)
async def test_a_hang_up_is_told(place: Path, answers: tuple[bytes, ...]) -> None:
    with pytest.raises(EngineFailed, match=r"^Firecracker hung up during PUT /machine-config$"):
        await ask(place, answering(*answers))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"220 smtp ready\r\n\r\n", "does not start with an HTTP"),
        (b"HTTP/2 200\r\n\r\n", "does not start with an HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "does not start with an HTTP"),
        (b"\r\n\r\n", "does not start with an HTTP"),
        (b"\xff" * 99 + b"\r\n\r\n", "does not start with an HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length is invalid"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", "Content-Length is invalid"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999\r\n\r\n", "Content-Length is invalid"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "has no length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), "is 65537 bytes long"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES, "head has no end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwhat", "not a JSON object"),
        (render_answer("200 OK", ["what"]), "not a JSON object"),
        (render_answer("200 OK", "what"), "not a JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60_000, "not a JSON object"),
    ],
)
async def test_an_invalid_answer_is_named_and_not_waited_for(place: Path, answer: bytes, why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(60)

    with pytest.raises(EngineFailed, match=rf"^Firecracker's answer to PUT /machine-config is invalid: .*{why}"):
        await ask(place, serve)


@pytest.mark.parametrize("piece", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
async def test_silence_has_an_end(place: Path, piece: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(piece)
        await asyncio.sleep(60)

    with pytest.raises(EngineFailed, match=r"^Firecracker did not answer PUT /machine-config within 0\.2 s$"):
        await ask(place, serve, HASTY)


async def test_after_a_failure_or_a_cancelled_call_the_next_one_gets_an_answer_of_its_own(place: Path) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        while True:
            await read_request(reader)
            await asyncio.sleep(0.3 if number < 3 else 0)
            writer.write(render_answer("200 OK", {"connection": number}))

    async with served(place, serve) as api:
        with pytest.raises(EngineFailed, match="did not answer"):
            await api.call(HASTY)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(api.call(CALL), 0.1)
        assert await api.call(CALL) == {"connection": 3}
        assert await api.call(CALL) == {"connection": 3}


async def test_calls_of_several_tasks_take_turns(place: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, asked = await read_request(reader)
            await asyncio.sleep(0.01)
            assert not reader._buffer, "the next call came before the answer"  # type: ignore[attr-defined]
            writer.write(render_answer("200 OK", asked))

    async with served(place, serve) as api:
        answers = await asyncio.gather(*(api.call(Call("PUT", "/vm", {"n": n})) for n in range(10)))
        assert answers == [{"n": n} for n in range(10)]


async def test_a_socket_that_comes_late_is_waited_for(place: Path) -> None:
    api = Api(place)
    connecting = asyncio.create_task(api.connect())
    await asyncio.sleep(0.1)
    with socket.socket(socket.AF_UNIX) as early:
        early.bind(str(place))  # there, and not listening yet
        await asyncio.sleep(0.1)
        assert not connecting.done()
        early.listen()
        await connecting
        await api.connect()
    await api.close()
    await api.close()


async def test_a_socket_that_never_comes_is_not_waited_for_for_ever(place: Path) -> None:
    with pytest.raises(EngineFailed, match=r"^Firecracker did not open its API within 0\.1 s$"):
        await Api(place).connect(0.1)


async def test_a_link_to_another_socket_is_not_followed(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pytest.fail("the link was followed")

    async with served(tmp_path / "other.sock", serve):
        planted = tmp_path / "api.sock"
        planted.symlink_to(tmp_path / "other.sock")
        with pytest.raises(EngineFailed, match=r"^Could not connect to Firecracker's API: "):
            await Api(planted).call(CALL)
        with pytest.raises(OSError, match="non-socket"):
            connected_socket(planted)


async def test_what_is_no_socket_is_not_waited_for(place: Path) -> None:
    place.write_text("a file")
    with pytest.raises(EngineFailed, match=r"^Could not connect to Firecracker's API: "):
        await Api(place).connect()
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(EngineFailed, match=r"^Could not connect to Firecracker's API: "):
        await Api(place).connect()


async def test_a_path_longer_than_a_socket_address_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with contextlib.chdir(deep):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("api.sock")
        listener.listen()
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), sock=listener)
    api = Api(deep / "api.sock")
    await api.connect()
    await api.close()
    server.close()
    await server.wait_closed()


# --- the real one ---


@pytest.fixture
def firecracker(tmp_path: Path) -> Iterator[Path]:
    """The directory a real Firecracker runs in."""
    binary = os.environ.get("FORKD_FIRECRACKER") or shutil.which("firecracker")
    if binary is None:
        pytest.skip("no firecracker on PATH or in FORKD_FIRECRACKER")
    process = subprocess.Popen(
        [binary, "--id", "test", "--api-sock", "api.sock"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    yield tmp_path
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=_EXIT_S)


async def test_the_real_firecracker_tells_who_it_is_and_refuses_in_its_own_words(firecracker: Path) -> None:
    api = Api(firecracker / "api.sock")
    told = await api.call(render_look())
    binary = Path(os.environ.get("FORKD_FIRECRACKER") or shutil.which("firecracker") or "")
    assert told is not None and told["id"] == "test" and told["vmm_version"] == ask_version(binary)
    with pytest.raises(EngineFailed, match="says that the VM is Not started"):
        parse_paused(told)
    with pytest.raises(EngineFailed, match=r"^Firecracker refused PUT /machine-config: .*vCPU"):
        await api.call(Call("PUT", "/machine-config", {"vcpu_count": 99, "mem_size_mib": 128}))
    with pytest.raises(EngineFailed, match=r"^Firecracker refused PUT /nonsense: "):
        await api.call(Call("PUT", "/nonsense", {}))
    await api.close()


async def test_the_real_firecracker_takes_the_plan_of_a_boot(firecracker: Path) -> None:
    spec = replace(NO_IMAGE, machine=MachineSpec(256, 8))
    for name in ("kernel", "initrd", "root.erofs"):
        (firecracker / name).write_bytes(bytes(4096))
    api = Api(firecracker / "api.sock")
    *configuring, starting = render_boot(spec, "kernel", "initrd", "root.erofs")
    for call in configuring:
        assert await api.call(call) is None
    # It has taken everything; what it was given is no kernel.
    with pytest.raises(EngineFailed, match=r"^Firecracker refused PUT /actions: "):
        await api.call(starting)
    await api.close()


async def test_the_real_firecracker_refuses_a_snapshot_that_is_none_and_names_it(firecracker: Path) -> None:
    api = Api(firecracker / "api.sock")
    with pytest.raises(EngineFailed, match=r"^Firecracker (refused|hung up during) PUT /snapshot/load"):
        await api.call(render_load("state", "memory"))
    await api.close()
