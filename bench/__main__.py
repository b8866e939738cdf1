"""`python -m bench`: measure, write JSON and a chart, print the tables."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.host import describe_host
from bench.measure import PARTS, Bench, remove_snapshot, run_round
from bench.report import Run, render_json, render_markdown
from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.errors import ForkdError, InvalidInput
from forkd.host.files import write_atomic
from forkd.host.paths import find_home
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import parse_count
from forkd.runtime import demo
from forkd.runtime.engines import open_engine
from forkd.runtime.session import session
from forkd.store.snapshots import SnapshotStore

_INTERRUPTED = 130
# As many as the target "ten runs in a row" asks for.
_ROUNDS = 10


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
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to measure; may be repeated")
    parser.add_argument("--engine", help="default: what doctor chooses")
    parser.add_argument("--out", type=Path, default=Path("bench/results.json"), help="default bench/results.json")
    parser.add_argument("--chart", type=Path, default=Path("docs/bench.svg"), help="default docs/bench.svg")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """0 when every child answered, however slow; 1 when one did not."""
    if args.rounds < 1:
        raise InvalidInput(f"Cannot measure {args.rounds} rounds", hint="Use 1 or more")
    sizes = tuple(sorted({parse_count(n) for n in args.n}))
    home = find_home()
    engine = open_engine(args.engine)
    with Shown(quiet=False) as shown:
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        started = Run(time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_host(engine), _settings(args.rounds, sizes))
        store = SnapshotStore(home.snapshots)
        with session(home.runtime) as directory:
            bench = Bench(engine, store, image, directory, shown, sizes, frozenset(args.only or PARTS))
            run_async(run_rounds(bench, started, args.rounds, lambda done: write_report(done, args.out)))
    report = render_json(started)
    write_chart(report, args.chart)
    print(render_markdown(report), end="")
    for failure in report["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report["failures"] else 0


async def run_rounds(bench: Bench, run: Run, count: int, on_round: Callable[[Run], None]) -> None:
    """Adds to `run` round by round: what was measured is kept when a later round cannot be."""
    try:
        for number in range(1, count + 1):
            run.rounds.append(await run_round(bench, f"round {number} of {count}"))
            on_round(run)
    finally:
        remove_snapshot(bench.store)


def write_report(run: Run, path: Path) -> None:
    write_atomic(path, json.dumps(render_json(run), indent=1).encode() + b"\n")


def write_chart(report: dict[str, object], path: Path) -> None:
    # Matplotlib takes half a second to import; a run that ends early does without.
    from bench.chart import draw

    draw(report, path)


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
