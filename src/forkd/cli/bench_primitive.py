"""`forkd bench primitive`: the fork itself, beside a C program that makes the same system calls."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from forkd.cli.output import note, print_rows, show
from forkd.errors import InvalidInput
from forkd.host.kvmfork.primitive import Primitive, Round, Timing, measure_primitive

_COUNT, _ROUNDS, _MOST = 100, 5, 1000
# How much longer than the C program it may take.
BOUND = 2.0


def run_primitive(args: argparse.Namespace) -> int:
    counts = args.n or [_COUNT]
    rounds = _ROUNDS if args.rounds is None else args.rounds
    if len(counts) != 1 or not 1 <= counts[0] <= _MOST or rounds < 1:
        raise InvalidInput(
            f"forkd bench primitive takes one -n of 1 to {_MOST}, and --rounds of 1 or more", hint="Try: -n 100"
        )
    if args.only or args.engine:
        raise InvalidInput("forkd bench primitive has no parts and no engine", hint="Leave --only and --engine out")
    measured = measure_primitive(
        counts[0], rounds, lambda number: None if args.json else note(f"round {number + 1} of {rounds}")
    )
    return show(args, render_json(measured), lambda _: _print_tables(measured))


def render_json(measured: Primitive) -> dict[str, Any]:
    return {
        "n": measured.count,
        "calls": measured.calls,
        "call_bytes": measured.call_bytes,
        "bound": BOUND,
        "reached": median_of(measured, lambda one: one.all_ratio) <= BOUND,
        "all_ratio": round(median_of(measured, lambda one: one.all_ratio), 2),
        "p50_ratio": round(median_of(measured, lambda one: one.p50_ratio), 2),
        "rounds": [{"native": _render(one.native), "forkd": _render(one.forkd)} for one in measured.rounds],
    }


def _render(timing: Timing) -> dict[str, float]:
    return {"all_ms": round(timing.all_ms, 1), "p50_ms": round(timing.p50_ms, 2), "p99_ms": round(timing.p99_ms, 2)}


def median_of(measured: Primitive, read: Callable[[Round], float]) -> float:
    return statistics.median(map(read, measured.rounds))


def _print_tables(measured: Primitive) -> None:
    rows = [
        _row(measured, f"{measured.count} forked and running, ms", lambda one: one.all_ms, 1),
        _row(measured, "one, p50, ms", lambda one: one.p50_ms, 2),
        _row(measured, "one, p99, ms", lambda one: one.p99_ms, 2),
    ]
    print_rows(("FORK", "C PROGRAM", "FORKD", "RATIO", "ROUNDS"), rows)
    print(f"\nA fork makes its VM by {measured.calls} calls with {measured.call_bytes} bytes of arguments.")
    reached = "within" if median_of(measured, lambda one: one.all_ratio) <= BOUND else "more than"
    print(f"{measured.count} forks take {reached} {BOUND:g} times as long as those of the C program.")


def _row(measured: Primitive, name: str, read: Callable[[Timing], float], digits: int) -> tuple[str, ...]:
    """Medians over the rounds; ratios are taken within each."""
    ratios = [read(one.forkd) / read(one.native) for one in measured.rounds]
    native = median_of(measured, lambda one: read(one.native))
    forkd = median_of(measured, lambda one: read(one.forkd))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return name, f"{native:.{digits}f}", f"{forkd:.{digits}f}", f"{statistics.median(ratios):.2f}", spread
