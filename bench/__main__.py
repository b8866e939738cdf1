"""`python -m bench`: measure, write JSON and charts, print the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from bench import daemon
from bench.branch import PART as BRANCH
from bench.branch import ROUNDS as BRANCH_ROUNDS
from bench.branch import Branching, begin_branches, run_branches
from bench.containers import PART as CONTAINERS
from bench.containers import measure_containers
from bench.daemon import default_service
from bench.engine import FORK_PARTS, PARTS, Bench, ForkSpecs, begin_run, describe_work, run_fork_parts, run_rounds
from bench.figures import render_failure
from bench.forks import FORK, START
from bench.ground import describe_host
from bench.lab import PART as LAB
from bench.lab import ROUNDS as LAB_ROUNDS
from bench.lab import SIZES as LAB_SIZES
from bench.lab import measure_lab
from bench.live import LiveSpec
from bench.many import CrowdSpec, EnduranceSpec
from bench.network import PART as NETWORK
from bench.network import ROUNDS as NETWORK_ROUNDS
from bench.network import NetworkSpec, run_network
from bench.report import SECTIONS, TOP, Report, find_section, read_results, render_report, write_results, write_run
from bench.wires import made_wires, why_no_wires
from forkd.cli.interrupts import run_async
from forkd.cli.progress import Shown
from forkd.cli.report import print_error
from forkd.errors import ForkdError, InvalidInput
from forkd.host.files import scratch_directory
from forkd.host.paths import find_home
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import parse_count
from forkd.runtime import demo
from forkd.runtime.doctor import open_engine
from forkd.runtime.runtime import session
from forkd.store.snapshots import SnapshotStore

_INTERRUPTED = 130
# As many as the target "ten runs in a row" asks for.
_ROUNDS = 10
_SIZES = (1, 10, 100)
# Each round of the daemon's costs has many requests of each kind.
_SERVICE_ROUNDS = 5
# One fork of one says little of the others: percentiles want more.
_SINGLES = 30
_ALL = (*PARTS, *(part for part in SECTIONS if part != TOP))
# By the section that each shows: the option that names its file, and the file.
_CHARTS = {
    TOP: ("--chart", Path("docs/bench.svg")),
    "daemon": ("--daemon-chart", Path("docs/bench-daemon.svg")),
    "live": ("--live-chart", Path("docs/bench-live.svg")),
    BRANCH: ("--branch-chart", Path("docs/bench-branch.svg")),
    NETWORK: ("--network-chart", Path("docs/bench-network.svg")),
    "lab": ("--lab-chart", Path("docs/bench-lab.svg")),
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_args(argv))
    except ForkdError as error:
        print_error(error, as_json=False)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted; the rounds that were done are written", file=sys.stderr)
        return _INTERRUPTED


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure forkd on this machine.")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"how often to measure all (default {_ROUNDS})")
    parser.add_argument("-n", type=int, nargs="+", help="children to fork (default 1 10 100; in the lab 1 10 30)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", action="append", choices=_ALL, help="a part to measure; may be repeated")
    what.add_argument("--render", action="store_true", help="measure nothing: tables and charts of what --out holds")
    live, crowd, endurance = LiveSpec(), CrowdSpec(), EnduranceSpec()
    parser.add_argument(
        "--live-forks", type=int, default=live.forks, help=f"live forks with each amount written (default {live.forks})"
    )
    parser.add_argument("--crowd", type=int, default=crowd.n, help=f"VMs alive at once (default {crowd.n})")
    parser.add_argument(
        "--endurance",
        type=int,
        nargs=2,
        metavar=("CYCLES", "FORKS"),
        default=(endurance.cycles, endurance.live),
        help=f"cycles of a template, forks of a busy VM (default {endurance.cycles} {endurance.live})",
    )
    parser.add_argument("--engine", help="default: what doctor chooses; the lab has its own")
    parser.add_argument("--out", type=Path, default=Path("bench/results.json"), help="default bench/results.json")
    for option, path in _CHARTS.values():
        parser.add_argument(option, type=Path, default=path, help=f"default {path}")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """0 when every child and the daemon answered, however slow; 1 when one did not."""
    for what, count in {"rounds": args.rounds, "live forks": args.live_forks, "cycles": min(args.endurance)}.items():
        if count < 1:
            raise InvalidInput(f"Cannot measure {count} {what}", hint="Use 1 or more")
    parse_count(args.crowd)
    asked = tuple(sorted({parse_count(n) for n in args.n or ()}))
    parts: frozenset[str] = frozenset() if args.render else frozenset(args.only or _ALL)
    read_results(args.out)  # what cannot be kept is refused before anything is measured
    failures = run_here(args, parts, asked or _SIZES) if parts - {LAB, CONTAINERS} else []
    failures += run_containers(max(asked or _SIZES), args.out) if CONTAINERS in parts else []
    failures += run_lab(min(args.rounds, LAB_ROUNDS), asked or LAB_SIZES, args.out) if LAB in parts else []
    report = read_results(args.out)
    write_charts(report, args)
    return print_report(report, parts, failures)


def run_here(args: argparse.Namespace, parts: Collection[str], sizes: tuple[int, ...]) -> list[str]:
    """What could not be measured on this host, of that which was asked for by name."""
    home = find_home()
    engine = open_engine(args.engine)
    lack = engine.why_no_live_forks()
    forks = tuple(part for part in FORK_PARTS if part in parts)
    with Shown(quiet=False) as shown:
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        with session(home.runtime) as directory:
            bench = Bench(
                engine,
                SnapshotStore(home.snapshots),
                image,
                directory,
                shown,
                sizes,
                frozenset(PARTS) & set(parts),
                singles=_SINGLES,
                ways=(START,) if lack else (FORK, START),
            )
            if bench.parts:
                settings = {"ways": list(bench.ways), "singles": _SINGLES, **({"no_templates": lack} if lack else {})}
                begun = begin_run(
                    describe_host(engine), {**describe_work(args.rounds, sizes, demo.MACHINE), **settings}
                )
                run_async(run_rounds(bench, begun, args.rounds, partial(write_run, args.out, TOP)))
            if forks and lack:
                shown.stage(f"not measured: {', '.join(forks)}: {lack}")
            elif forks:
                specs = fork_specs(args)
                write = partial(write_run, args.out)
                run_async(run_fork_parts(bench, forks, specs, args.rounds, describe_host(engine), write))
            unwired = (lack or why_no_wires()) if NETWORK in parts else None
            if unwired:
                shown.stage(f"not measured: {NETWORK}: {unwired}")
            elif NETWORK in parts:
                with made_wires() as wires:
                    spec, rounds = NetworkSpec(max(sizes)), min(args.rounds, NETWORK_ROUNDS)
                    write_network = partial(write_run, args.out, NETWORK)
                    run_async(run_network(bench, wires, spec, rounds, describe_host(engine), write_network))
            service = default_service(home, directory, shown, engine.name, sizes, min(args.rounds, _SERVICE_ROUNDS))
            for part in (part for part in daemon.PARTS if part in parts):
                begun = daemon.begin_part(service, part, describe_host(engine))
                run_async(daemon.run_part(service, part, begun, partial(write_run, args.out, part)))
            if BRANCH in parts:
                branching = Branching(home, shown, engine.name, min(args.rounds, BRANCH_ROUNDS))
                begun = begin_branches(branching, describe_host(engine))
                run_async(run_branches(branching, begun, partial(write_run, args.out, BRANCH)))
    refused = [(part, lack) for part in forks] + [(NETWORK, unwired)]
    return [f"{part}: {why}" for part, why in refused if why and part in (args.only or ())]


def fork_specs(args: argparse.Namespace) -> ForkSpecs:
    cycles, forks = args.endurance
    return ForkSpecs(LiveSpec(forks=args.live_forks), CrowdSpec(args.crowd), EnduranceSpec(cycles=cycles, live=forks))


def run_containers(n: int, out: Path) -> list[str]:
    """What failed. Without an image everything else is measured, and what was measured before stays."""
    home = find_home()
    try:
        with Shown(quiet=False) as shown, scratch_directory(home.snapshots) as scratch:
            image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
            write_run(out, CONTAINERS, run_async(measure_containers(image.root, scratch, n, shown)))
    except ForkdError as error:
        return [render_failure(CONTAINERS, error)]
    return []


def run_lab(rounds: int, sizes: Sequence[int], out: Path) -> list[str]:
    """What failed. Without a lab everything else has been measured, and what was measured in one before stays."""
    try:
        write_results(out, {LAB: measure_lab(rounds, sizes)})
    except ForkdError as error:
        return [render_failure(LAB, error)]
    return []


def write_charts(report: Report, args: argparse.Namespace) -> None:
    # Matplotlib takes half a second to import; a run that ends early does without.
    from bench.charts import draw

    for part, (option, _) in _CHARTS.items():
        if (section := find_section(report, part)) is not None:
            draw(part, section, getattr(args, option.strip("-").replace("-", "_")))


def print_report(report: Report, parts: Collection[str], failures: Sequence[str]) -> int:
    """The tables of all there is; the failures of what was measured now."""
    print(render_report(report), end="")
    measured = [report] if set(parts) & set(PARTS) else []
    measured += [report[part] for part in SECTIONS if part in parts and part in report]
    failures = [*failures, *(failure for section in measured for failure in section["failures"])]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
