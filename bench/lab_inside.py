"""`python3 -m bench.lab_inside`: measure two engines beside each other, on a machine with KVM, root and cgroup v2.

That is the lab machine, or a host that has all of it. Neither needs what charts are drawn with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from bench.host import describe_engines
from bench.lab_report import ENGINES, compose_round, render_lab
from bench.measure import Bench, begin_run, describe_work, remove_snapshot, round_parts
from bench.probes import GroupProbe
from bench.report import Round, Run, joined, render_failure
from forkd.cli.main import print_error
from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.engines.base import Engine
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import ForkdError
from forkd.host.files import write_atomic
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime.session import session
from forkd.store.snapshots import SnapshotStore
from lab.workshop import find_workshop

# Half of the demo's: all of it is read, checksummed and verified, which is slow under emulation.
MACHINE = MachineSpec(memory_mib=256, vcpus=1)
_PARTS = frozenset({"cold", "snapshot", "fork"})
# The first child of a run is the one for which all that starts a child is read and, in the lab, translated.
SINGLES = 5


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(parse_args(argv))
    except ForkdError as error:
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m bench.lab_inside")
    parser.add_argument("--out", type=Path, required=True, help="the section of the report, as JSON")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("-n", type=int, nargs="+", required=True)
    parser.add_argument("--emulated", action="store_true", help="this is no machine whose times mean anything")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    home, sizes = find_workshop().home, tuple(args.n)
    # Not as doctor would choose: it looks at everything, which takes half a minute under emulation.
    engines: tuple[Engine, ...] = (FirecrackerEngine(), QemuEngine("kvm"))
    with Shown(quiet=False) as shown, session(home.runtime) as directory:
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        store, probe = SnapshotStore(home.snapshots), GroupProbe(directory)
        benches = [
            Bench(engine, store, image, directory, shown, sizes, _PARTS, MACHINE, probe, tag_of(engine), SINGLES)
            for engine in engines
        ]
        host = {**describe_engines(engines), "emulated": args.emulated}
        begun = begin_run(
            host, {"engines": list(ENGINES), **describe_work(args.rounds, sizes, MACHINE), "singles": SINGLES}
        )
        run_async(run_rounds(benches, begun, args.rounds, lambda done: write_section(done, args.out)))


def tag_of(engine: Engine) -> SnapshotTag:
    return parse_tag(f"bench-{engine.name}")


async def run_rounds(benches: Sequence[Bench], run: Run, count: int, on_round: Callable[[Run], None]) -> None:
    """Adds to `run` round by round, in each of which none is the first that was in the one before."""
    for number in range(1, count + 1):
        done = await _run_all(benches if number % 2 else benches[::-1], f"round {number} of {count}")
        run.rounds.append(compose_round(done, benches[0].sizes))
        on_round(run)


async def _run_all(benches: Sequence[Bench], title: str) -> dict[str, Round]:
    """Part by part, each with all engines: a slow minute of the machine hits all of them."""
    parts: dict[str, list[Round]] = {bench.engine.name: [] for bench in benches}
    async with AsyncExitStack() as held:
        for bench in benches:
            held.callback(remove_snapshot, bench)
        turns = {bench.engine.name: round_parts(bench, f"{title}, {bench.engine.name}") for bench in benches}
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
    """A failure is a finding, after which that engine has no more turns in this round."""
    try:
        return await anext(turn, None)
    except ForkdError as error:
        return Round({}, (render_failure(title, error),))


def write_section(run: Run, path: Path) -> None:
    write_atomic(path, json.dumps(render_lab(run), indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
