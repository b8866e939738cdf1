"""A daemon under attack: the memory it takes, and what a sandbox notices that has nothing to do with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.figures import SAME_ROUND, Bound, Family, Round, Row, Values, shares
from bench.load import CLIENT_STOPS, Answers, ask, connected
from bench.served import TAG, Served
from forkd.errors import EngineFailed, HostLacks
from forkd.host.system import allow_open_files

_MOST_MIB = 250.0
_SLOWER = 3.0
_LAST = "the last command is answered"
SIEGE = Family(
    "siege",
    "siege: ",
    "fake engine; idle TCP connections, streams of endless output that nobody reads, and one that is read as fast as "
    "it comes, all for some seconds",
    {
        "errors": Row("errors and wrong answers", "", _LAST, (Bound("siege: no error, no wrong answer", "=", 0),)),
        "quiet": Row(
            "one command of a sandbox, before", "ms", CLIENT_STOPS, prepared="fake engine; nothing else to do"
        ),
        "begins": Row("one command while the attack begins", "ms", CLIENT_STOPS),
        "meanwhile": Row("one command meanwhile", "ms", CLIENT_STOPS),
        "slower": Row(
            "p99 meanwhile / before",
            "",
            SAME_ROUND,
            (Bound("siege: p99 of a command, meanwhile / before", "<=", _SLOWER),),
        ),
        "most": Row(
            "most memory of the daemon", "MiB", _LAST, (Bound("siege: most memory of the daemon", "<", _MOST_MIB),)
        ),
    },
)

_SETTLE_S = 2.0
_RECEIVE_BYTES = 4096
_STREAMS_EACH = 20  # in one sandbox
_ENDLESS = {"shell": "yes", "timeout_secs": 300}


@dataclass(frozen=True)
class SiegeSpec:
    idle: int = 1000
    unread: int = 100
    commands: int = 2000
    rounds: int = 3


async def measure_siege(daemon: Served, spec: SiegeSpec) -> Round:
    """Of a daemon that has its snapshot, and nothing else to do."""
    if shutil.which("curl") is None:
        raise HostLacks("curl is not installed", hint="It reads the stream that floods the daemon")
    allow_open_files()
    talkers = -(-spec.unread // _STREAMS_EACH)
    with daemon.rest() as rest:
        made = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": talkers + 2})
        sibling, flooding, *talking = [one["id"] for one in made]
        try:
            await _ask_often(daemon.socket, sibling, spec.commands // 10)
            forget_most(daemon.pid)
            quiet = await _ask_often(daemon.socket, sibling, spec.commands)
            with contextlib.ExitStack() as held:
                begins_in = asyncio.create_task(_ask_often(daemon.socket, sibling, spec.commands // 10))
                await asyncio.sleep(0)
                await asyncio.to_thread(_besiege, daemon, spec, talking, held)
                begins = await begins_in
                held.enter_context(flooded(daemon.socket, flooding))
                await asyncio.sleep(_SETTLE_S)
                meanwhile = await _ask_often(daemon.socket, sibling, spec.commands)
                most_mib = read_most_mib(daemon.pid)
        finally:
            for one in made:
                rest.ask("DELETE", f"/v1/sandboxes/{one['id']}")
    errors = [*quiet.errors, *begins.errors, *meanwhile.errors]
    values: Values = {
        "errors": len(errors),
        "quiet": quiet.took_ms,
        "begins": begins.took_ms,
        "meanwhile": meanwhile.took_ms,
        "slower": shares(meanwhile.took_ms)["p99"] / shares(quiet.took_ms)["p99"],
        "most": most_mib,
    }
    return Round(SIEGE.read(values), tuple(errors[:5]))


def _besiege(daemon: Served, spec: SiegeSpec, talking: list[str], held: contextlib.ExitStack) -> None:
    for _ in range(spec.idle):
        held.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
    for number in range(spec.unread):
        held.enter_context(unread_stream(daemon.socket, talking[number % len(talking)]))


def unread_stream(path: Path, sandbox_id: str) -> socket.socket:
    """Asked for; nobody reads what comes."""
    body = json.dumps(_ENDLESS).encode()
    head = f"POST /v1/sandboxes/{sandbox_id}/exec/stream HTTP/1.1\r\nhost: localhost\r\n"
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        stream.connect(str(path))
        stream.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    except BaseException:
        stream.close()
        raise
    return stream


@contextlib.contextmanager
def flooded(path: Path, sandbox_id: str) -> Iterator[None]:
    """Endless output that another process reads as fast as it comes."""
    url = f"http://localhost/v1/sandboxes/{sandbox_id}/exec/stream"
    command = ["curl", "--silent", "--no-buffer", "--output", "/dev/null", "--unix-socket", str(path)]
    process = subprocess.Popen([*command, "--json", json.dumps(_ENDLESS), url])
    try:
        yield
        if process.poll() is not None:
            raise EngineFailed(f"The flood ended early: curl exited with {process.returncode}")
    finally:
        process.kill()
        process.wait()


async def _ask_often(path: Path, sandbox_id: str, count: int) -> Answers:
    """One command after the other, on one connection."""
    answers = Answers()
    async with connected(path) as (reader, writer):
        for number in range(count):
            begun = time.perf_counter()
            body = {"args": ["/bin/echo", str(number)]}
            answer = await ask(reader, writer, "POST", f"/v1/sandboxes/{sandbox_id}/exec", body)
            answers.took_ms.append((time.perf_counter() - begun) * 1000)
            if json.loads(answer)["stdout"] != f"{number}\n":
                answers.errors.append(f"siege: {number} was answered with {answer[:200]!r}")
    return answers


def forget_most(pid: int) -> None:
    """The most memory it ever had begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def read_most_mib(pid: int) -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
