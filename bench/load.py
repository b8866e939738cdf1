"""Many clients at once: each sends one command after the other to a sandbox, and checks that the answer is its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.inventory import Use, settle, take_inventory, take_use
from bench.served import TAG, Served
from forkd.errors import EngineFailed

_ANSWER_S = 60.0
_MAX_ERRORS = 20
_LOOK_S = 0.5
_WARMING_S = 2.0


@dataclass(frozen=True)
class LoadSpec:
    clients: int = 200
    sandboxes: int = 20
    seconds: float = 60.0


@dataclass
class Answers:
    """What clients saw."""

    took_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """`early` is what the daemon used a third of the way, `late` at the end of the load, `after` once all were gone."""

    answers: Answers
    seconds: float
    before: Use
    early: Use
    late: Use
    after: Use
    leaks: list[str]


async def measure_load(daemon: Served, spec: LoadSpec) -> Load:
    """Of a daemon that has its snapshot, and nothing else to do."""
    with daemon.rest() as rest:
        ids = [one["id"] for one in rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": spec.sandboxes})]
        try:
            # With all connections once: pools, buffers and lazy imports are not growth.
            await _load(daemon, ids, spec.clients, _WARMING_S)
            inventory, before = take_inventory(daemon), take_use(daemon.pid)
            begun = time.monotonic()
            answers, uses = await _load(daemon, ids, spec.clients, spec.seconds)
            seconds = time.monotonic() - begun
            leaks = settle(daemon, inventory)
            after = take_use(daemon.pid)
        finally:
            for sandbox_id in ids:
                rest.ask("DELETE", f"/v1/sandboxes/{sandbox_id}")
    return Load(answers, seconds, before, uses[len(uses) // 3], uses[-1], after, leaks)


async def _load(daemon: Served, ids: list[str], clients: int, seconds: float) -> tuple[Answers, list[Use]]:
    answers, until = Answers(), time.monotonic() + seconds
    watching = asyncio.create_task(_watch(daemon.pid, until))
    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(_ask_on(daemon.socket, ids[number % len(ids)], f"c{number}", until, answers))
    return answers, await watching


async def _watch(pid: int, until: float) -> list[Use]:
    uses: list[Use] = []
    while not uses or time.monotonic() < until:
        uses.append(take_use(pid))
        await asyncio.sleep(_LOOK_S)
    return uses


async def _ask_on(path: Path, sandbox_id: str, name: str, until: float, answers: Answers) -> None:
    """One client. An error costs it its connection; it goes on with another."""
    count = 0
    while time.monotonic() < until and len(answers.errors) < _MAX_ERRORS:
        try:
            async with connected(path) as (reader, writer):
                while time.monotonic() < until:
                    count += 1
                    text = f"{name}-{count}"
                    begun = time.perf_counter()
                    body = {"args": ["/bin/echo", text]}
                    answer = await ask(reader, writer, "POST", f"/v1/sandboxes/{sandbox_id}/exec", body)
                    answers.took_ms.append((time.perf_counter() - begun) * 1000)
                    if json.loads(answer)["stdout"] != text + "\n":
                        answers.errors.append(f"{text} was answered with {answer[:200]!r}")
        except (OSError, EOFError, TimeoutError, EngineFailed) as error:
            answers.errors.append(f"{name}-{count}: {type(error).__name__}: {error}")


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: object = None
) -> bytes:
    """One request on a connection that stays; the body of the answer, which has to be a success."""
    sent = b"" if body is None else json.dumps(body).encode()
    kind = "" if body is None else "content-type: application/json\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(sent)}\r\n\r\n"
    async with asyncio.timeout(_ANSWER_S):
        writer.write(head.encode() + sent)
        await writer.drain()
        status, length = parse_head(await reader.readuntil(b"\r\n\r\n"))
        received = await reader.readexactly(length)
    if status >= 300:
        raise EngineFailed(f"{method} {path} was answered with {status}: {received[:300]!r}")
    return received


def parse_head(head: bytes) -> tuple[int, int]:
    """Status and length of the body."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), int(headers.get("content-length", 0))
