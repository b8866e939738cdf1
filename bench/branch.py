"""Branches of a running sandbox, as a client of the daemon sees them: how long it stands still, how soon a child is
of use, what is written; forks of five, going back, and the fiftieth branch of one sandbox."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.chain import ChainSpec, PackSpec, build_chain, measure_loaded, measure_packs, read_chain
from bench.clients import Client, Tries, check, connected_client, source_of
from bench.engine import begin_run, describe_guest
from bench.figures import SEE_BOTH, Bound, Family, Figure, Round, Row, Run, Settings, Values, Where, joined, shares
from bench.load import CLIENT_STOPS, ask, connected
from bench.served import Served, make_snapshot, placed, running
from forkd.errors import ForkdError
from forkd.host.files import scratch_directory
from forkd.host.paths import Home
from forkd.image import Progress
from forkd.model.machine import MachineSpec
from forkd.runtime import demo

PART = "branch"
ROUNDS = 2
IDLE, BUSY = "idle", "busy"
KINDS = {IDLE: "an idle sandbox", BUSY: "a sandbox that writes"}
# What is judged: with how much written, and the most that each may take, p50.
JUDGED_MIB, JUDGED_FORKS = 64, 5
PAUSE_MS, USABLE_MS, FORK_MS, REWIND_MS = 10.0, 80.0, 200.0, 60.0
_PAUSE_P99_MS = 30.0
_MORE = 1.25

_SANDBOX = "daemon and connection ready; a running sandbox that has answered before"
_ANSWERED = "the answer to {who} is read; starts before the first byte of the first request is sent"
_FIRST = _ANSWERED.replace("{who}", "the first evaluation in it")


def branched(kind: str, mib: int, n: int = JUDGED_FORKS) -> dict[str, object]:
    """The words for branches of one kind of sandbox, of which so much is written; forks make `n`."""
    ready = f"{_SANDBOX}, and has written to each page of {mib} MiB"
    goes_on = "; a thread goes on writing to all of them, as fast as it can" if kind == BUSY else ""
    return {"kind": kind, "who": KINDS[kind], "mib": mib, "n": n, "ready": ready + goes_on}


def _judged(_: Settings) -> Iterable[Where]:
    return (branched(kind, JUDGED_MIB) for kind in KINDS)


def _each_kind(settings: Settings) -> Iterable[Where]:
    tries = settings["branches"] + settings["written"] + settings["forks"] + settings["rewinds"]
    words = (branched(kind, settings["written_mib"], settings["children"]) for kind in KINDS)
    return ({**each, "tries": tries} for each in words)


_TARGET = "branch of {who}, {mib} MiB written: "
BRANCH = Family(
    "branch.{kind}",
    "branch of {who}: ",
    "{ready}",
    {
        "pause": Row(
            "it stands still",
            "ms",
            "the source runs again, by the VMM's own time stamp; starts before it is told to stop",
            (
                Bound(f"{_TARGET}pause, p50", "<=", PAUSE_MS, _judged, "p50"),
                Bound(f"{_TARGET}pause, p99", "<=", _PAUSE_P99_MS, _judged, "p99"),
            ),
        ),
        "returns": Row("the call returns", "ms", f"{CLIENT_STOPS}; wait=false"),
        "usable": Row(
            "a child of it answers",
            "ms",
            f"{_FIRST}: branch with wait=false, spawn, eval",
            (Bound(f"{_TARGET}a child answers, p50", "<=", USABLE_MS, _judged, "p50"),),
        ),
        "written": Row("written to disk", "ms", f"{CLIENT_STOPS}; wait=true"),
        "dirty": Row("differs from its parent", "MiB", "it is written; median", prepared="as the daemon tells it"),
        "stored": Row("takes on disk", "MiB", "it is written; median", prepared="as the daemon tells it"),
        "fork": Row(
            "fork of {n}, all have answered",
            "ms",
            "the last answer to the first evaluation of each is read; starts before the request is sent; the "
            "evaluations are sent at once, each over a connection that is open",
            (Bound("fork of {n} of {who}, {mib} MiB written: all have answered, p50", "<=", FORK_MS, _judged, "p50"),),
        ),
        "rewind": Row(
            "rewind, it has answered",
            "ms",
            f"{_FIRST} after the rewind",
            (Bound("rewind of {who}, {mib} MiB written: it has answered, p50", "<=", REWIND_MS, _judged, "p50"),),
            "{ready}; a checkpoint of that, on disk; all written anew since",
        ),
        "ok": Row(
            "branches, forks and rewinds that were right, and so was their source",
            "",
            "each has shown what it has in its memory",
            (Bound("branches of {who}: all right in every round", "=", "tries", _each_kind),),
        ),
    },
)
_WHAT = {"pause": "it stands still", "returns": "the call returns", "usable": "a child answers"}
_JUDGED_OFTEN = ("pause", "usable")


def _repeated(settings: Settings) -> Iterable[Where]:
    return (ends_of(settings["repeated"]),)


REPEATED = Family(
    "branch.repeated",
    "branches ",
    f"{_SANDBOX}; each branch is on disk before the next, and stays",
    {
        **{
            f"{name}.{{which}}": Row(f"{{which}} of one sandbox: {what}, p50", "ms", "as of a single branch")
            for name, what in _WHAT.items()
        },
        **{
            f"{name}.ratio": Row(
                f"{{last}} of one sandbox / {{first}}: {what}",
                "",
                "the last child has answered",
                (Bound(f"branches {{last}} of one sandbox / {{first}}: {what}", "<=", _MORE, _repeated),)
                if name in _JUDGED_OFTEN
                else (),
                SEE_BOTH,
            )
            for name, what in _WHAT.items()
        },
        "ok": Row(
            "of one sandbox that were right",
            "",
            "the last child has answered",
            (Bound("{repeated} branches of one sandbox: all right in every round", "=", "repeated", _repeated),),
        ),
    },
)

# How many branches at either end are compared: one alone may meet a bad moment.
_ENDS = 5


@dataclass(frozen=True)
class BranchSpec:
    """How often each is done with either kind of sandbox, with so much written; `repeated` is of one more."""

    written_mib: int = JUDGED_MIB
    branches: int = 20
    written: int = 5
    forks: int = 10
    children: int = JUDGED_FORKS
    rewinds: int = 10
    repeated: int = 50
    chain: ChainSpec = field(default_factory=ChainSpec)
    packs: PackSpec = field(default_factory=PackSpec)


@dataclass(frozen=True)
class Branching:
    """What is measured, on what, and where."""

    home: Home
    progress: Progress
    engine: str
    rounds: int = ROUNDS
    spec: BranchSpec = field(default_factory=BranchSpec)
    machine: MachineSpec = demo.MACHINE
    warm: str = demo.WARMUP.code or ""


@dataclass(frozen=True)
class BranchTimes:
    pause_ms: float
    returns_ms: float
    usable_ms: float


def begin_branches(branching: Branching, host: Mapping[str, Any]) -> Run:
    settings = {"rounds": branching.rounds, **describe_guest(branching.machine), **asdict(branching.spec)}
    return begin_run(host, {"engine": branching.engine, **settings})


async def run_branches(branching: Branching, run: Run, on_round: Callable[[Run], object]) -> None:
    """Adds to `run` as it goes. A failure is a finding."""
    for number in range(1, branching.rounds + 1):
        title = f"{PART}, round {number} of {branching.rounds}"
        try:
            run.rounds.append(await measure_round(branching, title))
        except ForkdError as error:
            run.rounds.append(Round.failed(title, error))
        on_round(run)


async def measure_round(branching: Branching, title: str) -> Round:
    """In a home of its own, where a second daemon finds what the first has written."""
    home, spec, show = branching.home, branching.spec, branching.progress.stage
    with scratch_directory(home.root) as root, placed(home.images, root) as place:
        with running(branching.engine, place) as daemon:
            show(f"{title}: daemon and snapshot")
            make_snapshot(daemon, branching.warm, branching.machine)
            with connected_client(daemon) as client:
                parts = []
                for kind in KINDS:
                    show(f"{title}: {KINDS[kind]}")
                    parts.append(await measure_kind(daemon, client, kind, spec))
                show(f"{title}: {spec.repeated} of one sandbox")
                parts.append(measure_repeated(client, spec))
                show(f"{title}: packs")
                parts.append(measure_packs(client, branching.machine, spec.packs))
                show(f"{title}: chain of {spec.chain.depth}")
                chain = build_chain(daemon, client, spec.chain)
        with running(branching.engine, place) as daemon, connected_client(daemon) as client:
            show(f"{title}: chain of {spec.chain.depth}, loaded")
            measure_loaded(client, spec.chain, chain)
    return joined([*parts, read_chain(chain)])


async def measure_kind(daemon: Served, client: Client, kind: str, spec: BranchSpec) -> Round:
    """All of one sandbox: what it writes, it writes again each time."""
    tries, times, sizes = Tries(f"branch of {KINDS[kind]}"), list[BranchTimes](), list[Any]()
    written, forks, rewinds = list[float](), list[float](), list[float]()
    with source_of(client, spec.written_mib) as source:
        for number in range(1, spec.branches + 1):
            with tries.one(f"branch {number}"):
                taken, info = _branch_checked(client, Scribbled(client, source, kind, number), f"{kind}-{number}")
                times.append(taken)
                sizes.append(info)
        for number in range(1, spec.written + 1):
            with tries.one(f"branch {number}, waited for"):
                written.append(_branch_waited(client, Scribbled(client, source, kind, number), f"{kind}-w{number}"))
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(connected(daemon.socket)) for _ in range(spec.children)]
            for number in range(1, spec.forks + 1):
                with tries.one(f"fork {number}"):
                    forks.append(await _fork_checked(client, Scribbled(client, source, kind, number), lines))
        for number in range(1, spec.rewinds + 1):
            with tries.one(f"rewind {number}"):
                rewinds.append(_rewind_checked(client, source, kind, number))
    values: Values = {"ok": tries.right, **samples(times), "written": written, "fork": forks, "rewind": rewinds}
    for name, key in {"dirty": "diff_dirty_bytes", "stored": "diff_physical_bytes"}.items():
        if found := [info[key] for info in sizes if info.get(key)]:
            values[name] = statistics.median(found) / 2**20
    return Round(BRANCH.read(values, **branched(kind, spec.written_mib, spec.children)), tuple(tries.failures))


class Scribbled:
    """A sandbox that has just written its area, and goes on with it if it is a busy one, until the block ends."""

    def __init__(self, client: Client, sandbox_id: str, kind: str, number: int) -> None:
        self.id = sandbox_id
        self._client = client
        self._kind = kind
        self._mark = number % 100 + 1

    def __enter__(self) -> Scribbled:
        begin = "passes = 0\nbegin()\n" if self._kind == BUSY else ""
        self._client.expect(self.id, f"write({self._mark})\n{begin}is_written({self._mark}) or going", True)
        return self

    def __exit__(self, *_: object) -> None:
        self.check(self.id)

    def check(self, sandbox_id: str) -> None:
        """It, or one that was forked from it, has what it wrote and nothing else. It writes no more."""
        end = "if going:\n    end()\n"
        self._client.expect(sandbox_id, f"{end}is_written({self._mark} + passes)", True)

    def spoil(self, sandbox_id: str) -> None:
        """What a fork writes, its source has not."""
        self._client.expect(sandbox_id, "passes = 0\nwrite(0)\nis_written(0)", True)


def _branch_checked(client: Client, source: Scribbled, tag: str) -> tuple[BranchTimes, Any]:
    with source:
        client.forget_stamps()
        begun = time.perf_counter()
        client.branch(source.id, tag, wait=False)
        returns_ms = client.rest.took_ms
        child = client.spawn(tag)
        client.evaluate(child)
        usable_ms = (time.perf_counter() - begun) * 1000
        pause_ms = client.take_pause_ms()
        source.check(child)
        source.spoil(child)
        client.kill(child)
    info = client.ready(tag)
    client.remove(tag)
    return BranchTimes(pause_ms, returns_ms, usable_ms), info


def _branch_waited(client: Client, source: Scribbled, tag: str) -> float:
    with source:
        client.branch(source.id, tag)
        took_ms = client.rest.took_ms
    client.remove(tag)
    return took_ms


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _fork_checked(client: Client, source: Scribbled, lines: Sequence[Line]) -> float:
    with source:
        begun = time.perf_counter()
        made = client.rest.ask("POST", f"/v1/sandboxes/{source.id}/fork", {"count": len(lines)})
        places = [f"/v1/sandboxes/{one['id']}/eval" for one in made]
        answers = await asyncio.gather(
            *(ask(*line, "POST", place, {"code": demo.CODE}) for line, place in zip(lines, places, strict=True))
        )
        took_ms = (time.perf_counter() - begun) * 1000
        for one, answer in zip(made, answers, strict=True):
            check(json.loads(answer), demo.EXPECTED)
            source.check(one["id"])
            source.spoil(one["id"])
            client.kill(one["id"])
    return took_ms


def _rewind_checked(client: Client, sandbox_id: str, kind: str, number: int) -> float:
    place, name = f"/v1/sandboxes/{sandbox_id}", f"{kind}-{number}"
    with Scribbled(client, sandbox_id, kind, number):
        made = client.rest.ask("POST", f"{place}/checkpoints", {"name": name})
        client.ready(made["tag"])
        # What is lost with the rewind. A busy one has to go on until then.
        client.expect(sandbox_id, "area[1::1024] = 7\nint(area[1])", 7)
        begun = time.perf_counter()
        client.rest.ask("POST", f"{place}/rewind", {"to": name})
        client.evaluate(sandbox_id)
        took_ms = (time.perf_counter() - begun) * 1000
        client.expect(sandbox_id, "int(area[1::1024].max())", 0)
    client.rest.ask("DELETE", f"{place}/checkpoints/{name}")
    return took_ms


def measure_repeated(client: Client, spec: BranchSpec) -> Round:
    """Each a few pages, so that none waits for a disk; all stay, as they do for those who keep them."""
    tries, times, tags = Tries(f"{spec.repeated} branches of one sandbox"), list[BranchTimes](), list[str]()
    with source_of(client, 1) as source:
        for number in range(1, spec.repeated + 1):
            tag = f"repeated-{number}"
            with tries.one(f"branch {number}"):
                client.expect(source, f"write({number})\nis_written({number})", True)
                client.forget_stamps()
                begun = time.perf_counter()
                client.branch(source, tag, wait=False)
                tags.append(tag)
                returns_ms = client.rest.took_ms
                child = client.spawn(tag)
                client.evaluate(child)
                usable_ms = (time.perf_counter() - begun) * 1000
                taken = BranchTimes(client.take_pause_ms(), returns_ms, usable_ms)
                client.expect(child, f"is_written({number})", True)
                client.kill(child)
                client.ready(tag)
                times.append(taken)
    with tries.one("removing them"):
        for tag in tags:
            client.remove(tag)
        tries.right -= 1
    return Round(read_repeated(times, spec.repeated), tuple(tries.failures))


def ends_of(count: int) -> dict[str, object]:
    """The words for the first and the last of so many."""
    ends = max(1, min(_ENDS, count // 2))
    return {"repeated": count, "first": f"1 to {ends}", "last": f"{count - ends + 1} to {count}"}


def read_repeated(times: Sequence[BranchTimes], count: int) -> dict[Figure, float]:
    """Where one of them failed there is no last one to compare."""
    words = ends_of(count)
    readings = REPEATED.read({"ok": len(times)}, **words)
    ends = max(1, min(_ENDS, count // 2))
    for name, values in samples(times).items() if len(times) == count else ():
        first, last = shares(values[:ends])["p50"], shares(values[-ends:])["p50"]
        for which, value in ((words["first"], first), (words["last"], last)):
            readings |= REPEATED.read({f"{name}.{{which}}": value}, which=which)
        # A pause that is not to be measured is no cost.
        readings |= REPEATED.read({f"{name}.ratio": last / first}, **words) if first else {}
    return readings


def samples(times: Sequence[BranchTimes]) -> dict[str, list[float]]:
    return {
        "pause": [each.pause_ms for each in times],
        "returns": [each.returns_ms for each in times],
        "usable": [each.usable_ms for each in times],
    }
