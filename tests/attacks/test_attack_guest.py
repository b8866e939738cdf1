"""Guests that want the daemon's memory and time: what they send is bounded, and a sibling goes on."""

import json
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hostile_agent import ALLOWED, ATTACKS
from support_client import Client
from support_daemon import Served, served
from support_images import made_home, make_image

import forkd

HOSTILE = Path(__file__).parent / "hostile_agent.py"
SOURCE = str(Path(forkd.__file__).parent.parent)
# Generous: what nobody bounded took a gibibyte in half a minute.
ROOM_MIB = 100
WHOLE_MIB = 250  # the daemon with all attacks under way
WAIT_S = 120.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with made_home(tmp_path_factory.mktemp("home")) as home:
        make_image(home)
        with served(home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as running:
            answer = Client(running.places[0]).post("/v1/snapshots", {"tag": "base", "image": "small", "wait": True})
            assert answer.status == 201, answer.content
            yield running
            assert "Traceback" not in running.read_log()


@pytest.fixture(scope="module")
def client(daemon: Served) -> Client:
    return Client(daemon.places[0])


@pytest.fixture
def spawn(client: Client) -> Iterator[Callable[[], str]]:
    paths = []

    def make() -> str:
        answer = client.post("/v1/sandboxes", {"snapshot_tag": "base"})
        assert answer.status == 201, answer.content
        paths.append(f"/v1/sandboxes/{answer.body[0]['id']}")
        return paths[-1]

    yield make
    for path in paths:
        assert client.delete(path).status == 204


@contextmanager
def bounded_memory(daemon: Served) -> Iterator[None]:
    """Inside, the daemon may take ROOM_MIB more than it had at the beginning, and no more at any moment."""
    Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5")  # VmHWM, the most it ever had, starts anew
    before = daemon.memory_mib("VmRSS")
    yield
    assert daemon.memory_mib("VmHWM") < before + ROOM_MIB


def take_over(client: Client, path: str, attack: str, ready: Path) -> None:
    """From here on the guest's agent is hostile."""
    command = {"args": [sys.executable, str(HOSTILE), attack, str(ready)], "env": {"PYTHONPATH": SOURCE}}
    assert client.post(f"{path}/processes", command).status == 201
    deadline = time.monotonic() + WAIT_S
    while not ready.exists():
        assert time.monotonic() < deadline, "The hostile agent did not start"
        time.sleep(0.01)


def open_stream(client: Client, path: str, command: str = "true") -> socket.socket:
    """An exec/stream that is asked for; whether it is read is for the caller."""
    body = json.dumps({"shell": command, "timeout_secs": 100}).encode()
    stream = client.raw(WAIT_S)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST {path}/exec/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    stream.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return stream


def read_to(stream: socket.socket, mark: bytes) -> bytes:
    """All up to the mark, and the rest of what came with it."""
    received = b""
    while mark not in received:
        more = stream.recv(65536)
        assert more, received[-1000:]
        received += more
    return received


def assert_serves(client: Client, path: str) -> None:
    answer = client.post(f"{path}/exec", {"args": ["echo", "here"]})
    assert answer.status == 200 and answer.body["stdout"] == "here\n", answer.content


@pytest.mark.parametrize("attack", sorted(set(ATTACKS) - {ALLOWED}))
def test_frames_that_cost_their_sender_nothing_cost_it_its_channel(
    daemon: Served, client: Client, spawn: Callable[[], str], tmp_path: Path, attack: str
) -> None:
    path, sibling = spawn(), spawn()
    take_over(client, path, attack, tmp_path / "ready")
    with bounded_memory(daemon), open_stream(client, path) as unread:
        for _ in range(20):
            assert_serves(client, sibling)
        assert b"protocol_error" in read_to(unread, b'"hint"')


def test_single_bytes_that_nobody_reads_are_kept_in_few_pieces(
    daemon: Served, client: Client, spawn: Callable[[], str], tmp_path: Path
) -> None:
    path, sibling = spawn(), spawn()
    take_over(client, path, ALLOWED, tmp_path / "ready")
    with bounded_memory(daemon), ExitStack() as streams:
        for _ in range(10):
            streams.enter_context(open_stream(client, path))
        for _ in range(20):
            assert_serves(client, sibling)


def test_a_hundred_streams_of_output_that_nobody_reads_hold_little(
    daemon: Served, client: Client, spawn: Callable[[], str]
) -> None:
    paths = [spawn() for _ in range(5)]
    with bounded_memory(daemon), ExitStack() as streams:
        opened = [streams.enter_context(open_stream(client, path, "yes")) for path in paths for _ in range(20)]
        assert len(opened) == 100
        for stream in opened:
            read_to(stream, b"event: stdout")
        for path in paths:
            assert_serves(client, path)


def test_output_that_is_much_larger_as_json_is_rendered_as_it_is_read(
    daemon: Served, client: Client, spawn: Callable[[], str]
) -> None:
    path, sibling = spawn(), spawn()
    size = 8 * 1024 * 1024
    nuls = {"shell": f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2"}
    with bounded_memory(daemon):
        whole = client.post(f"{path}/exec", nuls).body
        assert (len(whole["stdout"]), len(whole["stderr"]), whole["truncated"]) == (size, size, False)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(client.post, f"{path}/exec", nuls) for _ in range(8)]
            assert_serves(client, sibling)
            answers = [each.result() for each in asked]
    for answer in answers:
        # Together they are more than the daemon keeps: each has its beginning, and says that there was more.
        assert answer.status == 200
        assert set(answer.body["stdout"]) == {"\0"}
        assert answer.body["truncated"] is (len(answer.body["stdout"] + answer.body["stderr"]) < 2 * size)


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_all_of_it_at_once_leaves_the_daemon_small_and_a_sibling_served(
    daemon: Served, client: Client, spawn: Callable[[], str], tmp_path: Path
) -> None:
    talkers, hostile, sibling = [spawn() for _ in range(5)], spawn(), spawn()
    take_over(client, hostile, ALLOWED, tmp_path / "ready")
    with ExitStack() as held:
        for _ in range(1000):
            held.enter_context(Client(daemon.places[1]).raw(WAIT_S))
        for path in talkers:
            for _ in range(20):
                held.enter_context(open_stream(client, path, "yes"))
        for _ in range(10):
            held.enter_context(open_stream(client, hostile))
        for _ in range(30):
            assert_serves(client, sibling)
        assert daemon.memory_mib("VmHWM") < WHOLE_MIB
