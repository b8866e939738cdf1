"""Engines beside each other, on a machine with KVM, root and cgroup v2: the lab, or a host that has all of it.

`measure_lab` runs `python3 -m bench.lab` there, which needs nothing of what charts are drawn with.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.engine import Bench, begin_run, describe_work, remove_snapshot, round_parts
from bench.figures import (
    Bound,
    Family,
    Figure,
    Round,
    Run,
    Summary,
    Target,
    by_name,
    joined,
    judge_one,
    ratio,
    render_section,
    summarize,
)
from bench.forks import FORKS, GroupProbe, forked
from bench.ground import describe_engines, describe_machine
from bench.live import JUDGED_MIB, LIVE, PAUSE, LiveSpec, after_writing
from forkd.cli.interrupts import run_async
from forkd.cli.progress import Shown
from forkd.cli.report import print_error
from forkd.engines.base import Engine
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import EngineFailed, ForkdError, HostLacks
from forkd.host.files import write_atomic
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime.runtime import session
from forkd.store.snapshots import SnapshotStore
from lab.host import find_lack, find_workshop, run_here
from lab.run import run_in_machine
from lab.selection import Asked

PART = "lab"
# Each round boots, freezes and forks two engines on an emulated machine.
ROUNDS = 3
SIZES = (1, 10, 30)
# Firecracker's children are forks of a template; restored, each is a Firecracker that loads the snapshot, in its
# jailer's jail. The first is judged, the second is what it is compared with.
FORKED, RESTORED, QEMU = ENGINES = ("firecracker", "restored", "qemu")
# How many children the targets speak of.
TARGET_N = 30
UNIQUE_SHARE_PERCENT = 10.0
# Half of the demo's: all of it is read, checksummed and verified, which is slow under emulation.
MACHINE = MachineSpec(memory_mib=256, vcpus=1)
# The first child of a run is the one for which all that starts a child is read and, in the lab, translated.
SINGLES = 5
LIVE_FORKS = LiveSpec(written_mib=(0, JUDGED_MIB), forks=8, chain=10)

_FILE = "bench.json"
_PARTS = frozenset({"cold", "snapshot", "fork"})

# What the lab adds to the figures of an engine, which are read as they are, and named after it (`by_engine`).
LAB = Family(
    "",
    "",
    "",
    {
        "ratio.cold_boot_to_fork_{n}": ratio("cold boot of one / fork of {n}"),
        "ratio.pause_to_restore": ratio(
            f"{FORKED}: {{what}}, {JUDGED_MIB} MiB just written, p50 / {RESTORED}: fork of 1",
        ),
        "versus.{name}": ratio(f"{{what}}, {FORKED} / {RESTORED}"),
    },
)
_SPEEDUP = Bound("{engine}: a fork of 1 is at least 40 times as fast as a cold boot", ">=", 40.0)
_AGAINST_RESTORE = Bound("fork of 1, {engine} / restored", "<=", 0.25)
_PAUSE = Bound(f"pause of a live fork, {JUDGED_MIB} MiB just written, p50 / fork of 1, restored", "<=", 0.2)
_CPU = Bound("CPU time per child of {n}, {engine} / restored", "<=", 0.25)
_UNIQUE = Bound("unique memory of an idle child of {n}, {engine} / restored", "<=", 1.0)
_ALL_RIGHT = Bound("{engine}: {n} of {n} children right, the contract kept by each, in every round", "=", "n")
_LIVE_RIGHT = Bound(f"{{engine}}, live fork, {JUDGED_MIB} MiB just written: all forks right", "=", "forks")
_SMALL = Bound(
    "{engine}: unique memory of the largest of {n} idle children, of the guest's resident", "<", UNIQUE_SHARE_PERCENT
)


def by_engine(engine: str, figure: Figure) -> Figure:
    return replace(figure, name=f"{engine}.{figure.name}", what=f"{engine}, {figure.what}")


def compose_round(done: Mapping[str, Round], sizes: Sequence[int]) -> Round:
    """Of the rounds of each engine one, with the ratios between their readings. Pure."""
    readings: dict[Figure, float] = {}
    for engine, each in done.items():
        ours = {**each.readings, **_speedups(each, sizes)}
        readings |= {by_engine(engine, figure): value for figure, value in ours.items()}
    first, second = (done[engine].readings if engine in done else {} for engine in (FORKED, RESTORED))
    for figure, value in first.items():
        if figure.is_amount and second.get(figure):
            readings |= LAB.read({"versus.{name}": value / second[figure]}, name=figure.name, what=figure.what)
    readings |= _pause_to_restore(by_name(first), by_name(second))
    return Round(readings, tuple(failure for each in done.values() for failure in each.failures))


def _speedups(done: Round, sizes: Sequence[int]) -> dict[Figure, float]:
    values = by_name(done.readings)
    cold = values.get("cold_boot.total")
    speedups: dict[Figure, float] = {}
    for n in sizes:
        if (wall := values.get(FORKS.name("wall", **forked(n)))) and cold is not None:
            speedups |= LAB.read({"ratio.cold_boot_to_fork_{n}": cold / wall}, n=n)
    return speedups


def _pause_to_restore(first: Mapping[str, float], second: Mapping[str, float]) -> dict[Figure, float]:
    pause_ms = first.get(LIVE.name("pause", "p50", **after_writing(JUDGED_MIB)))
    restore_s = second.get(FORKS.name("wall", **forked(1)))
    if pause_ms is None or not restore_s:
        return {}
    return LAB.read({"ratio.pause_to_restore": pause_ms / 1000 / restore_s}, what=PAUSE)


def judge_lab(summaries: Mapping[str, Summary]) -> list[Target]:
    one, many, live = forked(1), forked(TARGET_N), {**after_writing(JUDGED_MIB), "forks": LIVE_FORKS.forks}
    ok, share = (FORKS.name(key, **many) for key in ("ok", "unique_share"))
    judged = [
        (_SPEEDUP, FORKED, f"{FORKED}.ratio.cold_boot_to_fork_1", ""),
        (_AGAINST_RESTORE, FORKED, f"versus.{FORKS.name('wall', **one)}", ""),
        (_PAUSE, FORKED, "ratio.pause_to_restore", ""),
        (_CPU, FORKED, f"versus.{FORKS.name('cpu_in_all', **many)}", ""),
        (_UNIQUE, FORKED, f"versus.{FORKS.name('idle_unique.mean', **many)}", ""),
        (_LIVE_RIGHT, FORKED, f"{FORKED}.{LIVE.name('ok', **live)}", "forks"),
    ]
    judged += [(_ALL_RIGHT, engine, f"{engine}.{ok}", "children") for engine in ENGINES]
    judged += [(_SMALL, engine, f"{engine}.{share}", "%") for engine in ENGINES]
    return [
        judge_one(bound, name, unit, summaries, {**many, **live, "engine": each}) for bound, each, name, unit in judged
    ]


def render_lab(run: Run) -> dict[str, Any]:
    """The section of results.json."""
    return render_section(run, judge_lab(summarize(run.rounds)))


def measure_lab(rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    """The section of results.json, measured where the machine is."""
    host, emulated = describe_machine(), find_lack() is not None
    command = render_command("python3" if emulated else sys.executable, rounds, sizes, emulated=emulated)
    status = run_in_machine(Asked(), command) if emulated else run_here(Asked(), command)
    section = read_section(find_workshop().results / _FILE, status)
    if emulated:
        section["host"]["emulated_on"] = host
    return section


def render_command(python: str, rounds: int, sizes: Sequence[int], *, emulated: bool) -> str:
    words = [python, "-m", "bench.lab", "--rounds", str(rounds), *(["--emulated"] if emulated else [])]
    return f'{shlex.join(words)} -n {" ".join(map(str, sizes))} --out "$FORKD_LAB_OUT/{_FILE}"'


def read_section(path: Path, status: int) -> dict[str, Any]:
    """What was measured, with a failure where it ended before its end."""
    try:
        section = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineFailed(
            f"The measurement in the lab ended with exit status {status} before its first round"
        ) from None
    assert isinstance(section, dict)
    if status != 0:
        section["failures"].append(f"lab: ended with exit status {status}")
    return section


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(parse_args(argv))
    except ForkdError as error:
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m bench.lab")
    parser.add_argument("--out", type=Path, required=True, help="the section of the report, as JSON")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("-n", type=int, nargs="+", required=True)
    parser.add_argument("--emulated", action="store_true", help="its times mean nothing by themselves")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    home, sizes = find_workshop().home, tuple(args.n)
    # Not as doctor would choose: it looks at everything, which takes half a minute under emulation.
    engines: Mapping[str, Engine] = {
        FORKED: FirecrackerEngine(),
        RESTORED: FirecrackerEngine(live_forks=False),
        QEMU: QemuEngine("kvm"),
    }
    if lack := engines[FORKED].why_no_live_forks():
        raise HostLacks(f"Firecracker's VMs cannot be forked here: {lack}", hint="See: forkd doctor")
    with Shown(quiet=False) as shown, session(home.runtime) as directory:
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        store, probe = SnapshotStore(home.snapshots), GroupProbe(directory)
        benches = {
            name: Bench(engine, store, image, directory, shown, sizes, _PARTS, MACHINE, probe, tag_of(name), SINGLES)
            for name, engine in engines.items()
        }
        benches[FORKED] = replace(benches[FORKED], templated=True, live=LIVE_FORKS)
        host = {**describe_engines(tuple(engines.values())), "emulated": args.emulated}
        begun = begin_run(
            host, {"engines": list(ENGINES), **describe_work(args.rounds, sizes, MACHINE), "singles": SINGLES}
        )
        run_async(run_rounds(benches, begun, args.rounds, lambda done: write_section(done, args.out)))


def tag_of(name: str) -> SnapshotTag:
    return parse_tag(f"bench-{name}")


async def run_rounds(benches: Mapping[str, Bench], run: Run, count: int, on_round: Callable[[Run], None]) -> None:
    """Adds to `run` round by round, in each of which none is the first that was in the one before."""
    sizes = next(iter(benches.values())).sizes
    for number in range(1, count + 1):
        turns = list(benches.items())
        done = await _run_all(dict(turns if number % 2 else turns[::-1]), f"round {number} of {count}")
        run.rounds.append(compose_round(done, sizes))
        on_round(run)


async def _run_all(benches: Mapping[str, Bench], title: str) -> dict[str, Round]:
    """Part by part, each with all engines: a slow minute of the machine hits all of them."""
    parts: dict[str, list[Round]] = {name: [] for name in benches}
    async with AsyncExitStack() as held:
        for bench in benches.values():
            held.callback(remove_snapshot, bench)
        turns = {name: round_parts(bench, f"{title}, {name}") for name, bench in benches.items()}
        for turn in turns.values():
            await held.enter_async_context(aclosing(turn))
        while turns:
            for name, turn in list(turns.items()):
                part = await _next_part(turn, f"{title}, {name}")
                if part is None:
                    del turns[name]
                else:
                    parts[name].append(part)
    return {name: joined(each) for name, each in parts.items()}


async def _next_part(turn: AsyncIterator[Round], title: str) -> Round | None:
    """After a failure that engine has no more turns in this round."""
    try:
        return await anext(turn, None)
    except ForkdError as error:
        return Round.failed(title, error)


def write_section(run: Run, path: Path) -> None:
    write_atomic(path, json.dumps(render_lab(run), indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
