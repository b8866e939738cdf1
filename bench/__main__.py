"""`python -m bench`: measure, write JSON and a chart, print the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.containers import PART as CONTAINERS
from bench.containers import measure_containers, render_containers_markdown
from bench.crowd import CrowdSpec
from bench.endurance import EnduranceSpec
from bench.engine_report import render_json, render_markdown, with_ratios
from bench.figures import FORK, START
from bench.fork_parts import ForkSpecs, run_fork_parts
from bench.fork_report import PARTS as FORK_PARTS
from bench.fork_report import render_forks_markdown
from bench.fork_report import render_part as render_fork_part
from bench.host import describe_host
from bench.lab import ROUNDS as LAB_ROUNDS
from bench.lab import SIZES as LAB_SIZES
from bench.lab import measure_lab
from bench.lab_report import PART as LAB
from bench.lab_report import render_lab_markdown
from bench.live import LiveSpec
from bench.load import LoadSpec
from bench.measure import PARTS, Bench, begin_run, describe_work, remove_snapshot, run_round
from bench.report import Round, Run, render_failure, render_section
from bench.results import SECTIONS, read_results, write_results
from bench.service import FAKE, Service, begin_part, default_costs, default_cycles, default_warm, run_part
from bench.service_report import PARTS as SERVICE_PARTS
from bench.service_report import render_part, render_service_markdown
from forkd.cli.main import print_error
from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.errors import ForkdError, InvalidInput
from forkd.host.files import scratch_directory
from forkd.host.paths import Home, find_home
from forkd.image import ImageStore, Progress, debian_spec, get_recipe
from forkd.model.machine import parse_count
from forkd.runtime import demo
from forkd.runtime.engines import open_engine
from forkd.runtime.session import session
from forkd.store.snapshots import SnapshotStore

_INTERRUPTED = 130
# As many as the target "ten runs in a row" asks for.
_ROUNDS = 10
_SIZES = (1, 10, 100)
# Each round of the daemon's costs has many requests of each kind.
_SERVICE_ROUNDS = 5
# One fork of one says little of the others: percentiles want more.
_SINGLES = 30


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
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, *SECTIONS), help="a part to measure; may be repeated"
    )
    live, endurance = LiveSpec(), EnduranceSpec()
    parser.add_argument(
        "--live-forks", type=int, default=live.forks, help=f"live forks with each amount written (default {live.forks})"
    )
    parser.add_argument("--crowd", type=int, default=CrowdSpec().n, help=f"VMs alive at once (default {CrowdSpec().n})")
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
    parser.add_argument("--chart", type=Path, default=Path("docs/bench.svg"), help="default docs/bench.svg")
    parser.add_argument(
        "--daemon-chart", type=Path, default=Path("docs/bench-daemon.svg"), help="default docs/bench-daemon.svg"
    )
    parser.add_argument(
        "--live-chart", type=Path, default=Path("docs/bench-live.svg"), help="default docs/bench-live.svg"
    )
    parser.add_argument("--lab-chart", type=Path, default=Path("docs/bench-lab.svg"), help="default docs/bench-lab.svg")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """0 when every child and the daemon answered, however slow; 1 when one did not."""
    for what, count in {"rounds": args.rounds, "live forks": args.live_forks, "cycles": min(args.endurance)}.items():
        if count < 1:
            raise InvalidInput(f"Cannot measure {count} {what}", hint="Use 1 or more")
    parse_count(args.crowd)
    asked = tuple(sorted({parse_count(n) for n in args.n or ()}))
    parts = frozenset(args.only or (*PARTS, *SECTIONS))
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
                run_async(run_rounds(bench, begun, args.rounds, lambda done: write_report(done, args.out)))
            forks = tuple(part for part in FORK_PARTS if part in parts)
            if forks and lack:
                shown.stage(f"not measured: {', '.join(forks)}: {lack}")
            elif forks:
                run_async(run_forks(bench, forks, args))
            service = _service(home, directory, shown, engine.name, sizes, min(args.rounds, _SERVICE_ROUNDS))
            for part in (part for part in SERVICE_PARTS if part in parts):
                run_async(run_service_part(service, part, describe_host(engine), args.out))
    return [f"{part}: {lack}" for part in forks if lack and part in (args.only or ())]


async def run_forks(bench: Bench, parts: tuple[str, ...], args: argparse.Namespace) -> None:
    cycles, forks = args.endurance
    specs = ForkSpecs(LiveSpec(forks=args.live_forks), CrowdSpec(args.crowd), EnduranceSpec(cycles=cycles, live=forks))

    def write(part: str, done: Run) -> None:
        write_results(args.out, {part: render_fork_part(part, done)})

    await run_fork_parts(bench, parts, specs, args.rounds, describe_host(bench.engine), write)


def run_containers(n: int, out: Path) -> list[str]:
    """What failed. Without an image everything else is measured, and what was measured before stays."""
    home = find_home()
    try:
        with Shown(quiet=False) as shown, scratch_directory(home.snapshots) as scratch:
            image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
            done = run_async(measure_containers(image.root, scratch, n, shown))
    except ForkdError as error:
        return [render_failure(CONTAINERS, error)]
    write_results(out, {CONTAINERS: render_section(done, ())})
    return []


def run_lab(rounds: int, sizes: Sequence[int], out: Path) -> list[str]:
    """What failed. Without a lab everything else has been measured, and what was measured in one before stays."""
    try:
        write_results(out, {LAB: measure_lab(rounds, sizes)})
    except ForkdError as error:
        return [render_failure(LAB, error)]
    return []


def print_report(report: Mapping[str, Any], parts: Collection[str], failures: Sequence[str]) -> int:
    """The tables of all there is; the failures of what was measured now."""
    tables = (
        render_markdown(report) if "figures" in report else "",
        render_forks_markdown(report),
        render_service_markdown(report),
        render_lab_markdown(report),
        render_containers_markdown(report),
    )
    print("\n".join(table for table in tables if table), end="")
    measured = [report] if set(parts) & set(PARTS) else []
    measured += [report[part] for part in SECTIONS if part in parts and part in report]
    failures = [*failures, *(failure for section in measured for failure in section["failures"])]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


async def run_service_part(service: Service, part: str, host: Mapping[str, Any], out: Path) -> None:
    begun = begin_part(service, part, host)
    await run_part(service, part, begun, lambda done: write_results(out, {part: render_part(part, done)}))


async def run_rounds(bench: Bench, run: Run, count: int, on_round: Callable[[Run], None]) -> None:
    """Adds to `run` round by round: what was measured is kept when a later round cannot be."""
    try:
        for number in range(1, count + 1):
            done = await run_round(bench, f"round {number} of {count}")
            run.rounds.append(Round(with_ratios(done.readings, bench.sizes), done.failures))
            on_round(run)
    finally:
        remove_snapshot(bench)


def write_report(run: Run, path: Path) -> None:
    write_results(path, render_json(run))


def write_charts(report: Mapping[str, Any], args: argparse.Namespace) -> None:
    # Matplotlib takes half a second to import; a run that ends early does without.
    from bench.chart import draw
    from bench.lab_chart import draw_lab
    from bench.live_chart import draw_live
    from bench.service_chart import draw_daemon

    if "figures" in report:
        draw(report, args.chart)
    if "live" in report:
        draw_live(report["live"], args.live_chart)
    if "daemon" in report:
        draw_daemon(report["daemon"], args.daemon_chart)
    if LAB in report:
        draw_lab(report[LAB], args.lab_chart)


def _service(
    home: Home, directory: Path, progress: Progress, engine: str, sizes: tuple[int, ...], rounds: int
) -> Service:
    engines = (FAKE,) if engine == FAKE else (FAKE, engine)
    return Service(
        home,
        directory,
        progress,
        engines,
        {name: default_costs(name, sizes) for name in engines},
        LoadSpec(),
        {name: default_cycles(name) for name in engines},
        rounds,
        {name: default_warm(name) for name in engines},
    )


if __name__ == "__main__":
    sys.exit(main())
