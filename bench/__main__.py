"""`python -m bench`: measure, write JSON and a chart, print the tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.host import describe_host
from bench.load import LoadSpec
from bench.measure import PARTS, Bench, remove_snapshot, run_round
from bench.report import Run, render_json, render_markdown
from bench.results import read_results, write_results
from bench.service import FAKE, Service, begin_part, default_costs, default_cycles, default_warm, run_part
from bench.service_report import PARTS as SERVICE_PARTS
from bench.service_report import render_part, render_service_markdown
from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.errors import ForkdError, InvalidInput
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
# Each round of the daemon's costs has many requests of each kind.
_SERVICE_ROUNDS = 5
_TIME = "%Y-%m-%dT%H:%M:%S%z"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_args(argv))
    except ForkdError as error:
        for line in (f"error: {error.message}", error.details, error.hint and f"hint: {error.hint}"):
            if line:
                print(line, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted; the rounds that were done are written", file=sys.stderr)
        return _INTERRUPTED


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure forkd on this machine.")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"how often to measure all (default {_ROUNDS})")
    parser.add_argument("-n", type=int, nargs="+", default=[1, 10, 100], help="children to fork (default 1 10 100)")
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, *SERVICE_PARTS), help="a part to measure; may be repeated"
    )
    parser.add_argument("--engine", help="default: what doctor chooses")
    parser.add_argument("--out", type=Path, default=Path("bench/results.json"), help="default bench/results.json")
    parser.add_argument("--chart", type=Path, default=Path("docs/bench.svg"), help="default docs/bench.svg")
    parser.add_argument(
        "--daemon-chart", type=Path, default=Path("docs/bench-daemon.svg"), help="default docs/bench-daemon.svg"
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """0 when every child and the daemon answered, however slow; 1 when one did not."""
    if args.rounds < 1:
        raise InvalidInput(f"Cannot measure {args.rounds} rounds", hint="Use 1 or more")
    sizes = tuple(sorted({parse_count(n) for n in args.n}))
    parts = frozenset(args.only or (*PARTS, *SERVICE_PARTS))
    read_results(args.out)  # what cannot be kept is refused before anything is measured
    home = find_home()
    engine = open_engine(args.engine)
    with Shown(quiet=False) as shown:
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        with session(home.runtime) as directory:
            if chosen := parts & frozenset(PARTS):
                started = Run(time.strftime(_TIME), describe_host(engine), _settings(args.rounds, sizes))
                bench = Bench(engine, SnapshotStore(home.snapshots), image, directory, shown, sizes, chosen)
                run_async(run_rounds(bench, started, args.rounds, lambda done: write_report(done, args.out)))
            service = _service(home, directory, shown, engine.name, sizes, min(args.rounds, _SERVICE_ROUNDS))
            for part in (part for part in SERVICE_PARTS if part in parts):
                run_async(run_service_part(service, part, describe_host(engine), args.out))
    report = read_results(args.out)
    write_charts(report, args)
    return print_report(report, parts)


def print_report(report: Mapping[str, Any], parts: Collection[str]) -> int:
    """The tables of all there is; the failures of what was measured now."""
    print(render_markdown(report) if "figures" in report else "", render_service_markdown(report), sep="\n", end="")
    measured = [report] if set(parts) & set(PARTS) else []
    measured += [report[part] for part in SERVICE_PARTS if part in parts]
    failures = [failure for section in measured for failure in section["failures"]]
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
            run.rounds.append(await run_round(bench, f"round {number} of {count}"))
            on_round(run)
    finally:
        remove_snapshot(bench.store)


def write_report(run: Run, path: Path) -> None:
    write_results(path, render_json(run))


def write_charts(report: Mapping[str, Any], args: argparse.Namespace) -> None:
    # Matplotlib takes half a second to import; a run that ends early does without.
    from bench.chart import draw
    from bench.service_chart import draw_daemon

    if "figures" in report:
        draw(report, args.chart)
    if "daemon" in report:
        draw_daemon(report["daemon"], args.daemon_chart)


def _service(
    home: Home, directory: Path, progress: Progress, engine: str, sizes: tuple[int, ...], rounds: int
) -> Service:
    engines = (FAKE,) if engine == FAKE else (FAKE, engine)
    return Service(
        home, directory, progress, engines, default_costs(sizes), LoadSpec(), default_cycles(), rounds, default_warm()
    )


def _settings(rounds: int, sizes: Sequence[int]) -> dict[str, object]:
    return {
        "rounds": rounds,
        "n": list(sizes),
        "memory_mib": demo.MACHINE.memory_mib,
        "vcpus": demo.MACHINE.vcpus,
        "warm_up": demo.WARMUP.describe(),
        "eval": demo.CODE,
    }


if __name__ == "__main__":
    sys.exit(main())
