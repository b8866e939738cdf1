"""A daemon under load: many clients at once, and sandboxes that come and go. Afterwards everything is as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.figures import EACH, Bound, Family, Round, Row, Settings, Values, Where
from bench.inventory import Use, settle, take_inventory, take_use
from bench.served import TAG, Served
from forkd.errors import EngineFailed

CLIENT_STOPS = "the last byte of the answer is read; starts before the first byte of the request is sent"
_END = "the time is over and every client has its last answer"
_ALL_GONE = "all clients are gone and the daemon has put away what it needed for them"
LOAD = Family(
    "load",
    "load: ",
    "fake engine; all clients were connected for some seconds before; each has one request under way",
    {
        "requests": Row("commands answered", "", _END),
        "errors": Row("errors and wrong answers", "", _END, (Bound("load: no error, no wrong answer", "=", 0),)),
        "rate": Row("commands per second", "1/s", _END),
        EACH: Row("one command", "ms", CLIENT_STOPS),
        "resident.before": Row("memory of the daemon before", "MiB", "the clients are about to connect"),
        "resident.early": Row("memory of the daemon after a third of the time", "MiB", "a third of the time is over"),
        "resident.late": Row("memory of the daemon at the end", "MiB", "the time is over"),
        # What "no growth without bound" means: memory that is still gained when all clients have been there for long.
        "growth": Row(
            "memory gained in the last two thirds",
            "MiB",
            "the time is over",
            (Bound("load: memory gained in the last two thirds", "<=", 2.0),),
        ),
        "left": Row(
            "descriptors, tasks, processes, rows, files left",
            "",
            _ALL_GONE,
            (Bound("load: nothing is left of the clients", "=", 0),),
        ),
    },
)


def each_engine(settings: Settings) -> Iterable[Where]:
    return ({"engine": engine} for engine in settings["engines"])


_LAST = "the last DELETE is answered"
CYCLES = Family(
    "cycles.{engine}",
    "{engine}, spawn, eval, kill: ",
    "daemon and snapshot ready, some cycles done before",
    {
        "done": Row("cycles done", "", _LAST),
        "errors": Row(
            "errors and wrong answers", "", _LAST, (Bound("{engine}, cycles: no error", "=", 0, each_engine),)
        ),
        "rate": Row("cycles per second", "1/s", _LAST),
        EACH: Row("one cycle", "ms", "its DELETE is answered; starts before its POST is sent"),
        "growth": Row("memory gained by the daemon", "MiB", _ALL_GONE),
        "left": Row(
            "processes, descriptors, sockets, tasks, rows, files left",
            "",
            _ALL_GONE,
            (Bound("{engine}, cycles: nothing is left", "=", 0, each_engine),),
        ),
    },
)

_ANSWER_S = 60.0
_MAX_ERRORS = 20
_SHOWN = 5
_LOOK_S = 0.5
_WARMING_S = 2.0
_WARMING = 4


@dataclass(frozen=True)
class LoadSpec:
    clients: int = 200
    sandboxes: int = 20
    seconds: float = 60.0


@dataclass(frozen=True)
class CycleSpec:
    cycles: int = 1000
    at_once: int = 4
    network: object = "none"  # as in the API


@dataclass
class Answers:
    """What clients saw."""

    took_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cycles:
    """`before` is what the daemon used before the clients came, `after` once all were gone."""

    answers: Answers
    seconds: float
    before: Use
    after: Use
    leaks: list[str]

    def values(self) -> Values:
        return {
            "errors": len(self.answers.errors),
            "rate": len(self.answers.took_ms) / self.seconds,
            EACH: self.answers.took_ms,
            "left": len(self.leaks),
        }

    def failures(self, title: str) -> tuple[str, ...]:
        return tuple(f"{title}: {what}" for what in (*self.answers.errors[:_SHOWN], *self.leaks[:_SHOWN]))

    def read(self, engine: str) -> Round:
        growth = self.after.resident_mib - self.before.resident_mib
        values = {"done": len(self.answers.took_ms), "growth": growth, **self.values()}
        return Round(CYCLES.read(values, engine=engine), self.failures(f"cycles, {engine}"))


@dataclass(frozen=True)
class Load(Cycles):
    """`early` is what the daemon used a third of the way, `late` at the end of the load."""

    early: Use
    late: Use

    def read(self, engine: str) -> Round:
        values = {
            "requests": len(self.answers.took_ms),
            "resident.before": self.before.resident_mib,
            "resident.early": self.early.resident_mib,
            "resident.late": self.late.resident_mib,
            "growth": self.late.resident_mib - self.early.resident_mib,
            **self.values(),
        }
        return Round(LOAD.read(values), self.failures("load"))


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
            leaks = await settle(inventory, lambda: take_inventory(daemon))
            after = take_use(daemon.pid)
        finally:
            for sandbox_id in ids:
                rest.ask("DELETE", f"/v1/sandboxes/{sandbox_id}")
    return Load(answers, seconds, before, after, leaks, uses[len(uses) // 3], uses[-1])


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


async def measure_cycles(daemon: Served, spec: CycleSpec) -> Cycles:
    """Of a daemon that has its snapshot. One cycle: fork one, have it compute something, kill it."""
    # Once before: pools, logs and lazy imports are not leaks.
    await _cycle_all(daemon, replace(spec, cycles=max(_WARMING, spec.at_once)))
    inventory, before = take_inventory(daemon), take_use(daemon.pid)
    begun = time.monotonic()
    answers = await _cycle_all(daemon, spec)
    seconds = time.monotonic() - begun
    leaks = await settle(inventory, lambda: take_inventory(daemon))
    return Cycles(answers, seconds, before, take_use(daemon.pid), leaks)


async def _cycle_all(daemon: Served, spec: CycleSpec) -> Answers:
    answers = Answers()
    numbers = iter(range(spec.cycles))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(spec.at_once):
            tasks.create_task(_cycle(daemon, spec.network, numbers, answers))
    return answers


async def _cycle(daemon: Served, network: object, numbers: Iterator[int], answers: Answers) -> None:
    wanted = {"snapshot_tag": TAG, "network": network}
    async with connected(daemon.socket) as (reader, writer):
        for number in numbers:
            begun = time.perf_counter()
            try:
                made = json.loads(await ask(reader, writer, "POST", "/v1/sandboxes", wanted))
                place = f"/v1/sandboxes/{made[0]['id']}"
                result = json.loads(await ask(reader, writer, "POST", f"{place}/eval", {"code": f"{number} * 2"}))
                await ask(reader, writer, "DELETE", place)
            except EngineFailed as error:
                answers.errors.append(f"cycle {number}: {error.message}")
                continue
            answers.took_ms.append((time.perf_counter() - begun) * 1000)
            if result["value"] != number * 2:
                answers.errors.append(f"cycle {number} computed {result}")


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
