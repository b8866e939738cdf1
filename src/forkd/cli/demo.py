"""`forkd demo`: from nothing to n forked VMs, with the figures on one screen."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forkd.cli.interrupts import run_async
from forkd.cli.progress import Shown
from forkd.errors import ContractBroken, InvalidInput
from forkd.host.paths import find_home
from forkd.host.system import allow_open_files
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import parse_count
from forkd.runtime.demo import CODE, TAG, Result
from forkd.runtime.demo import run_demo as fork_and_measure
from forkd.runtime.doctor import open_engine
from forkd.runtime.runtime import session
from forkd.store.snapshots import SnapshotStore

_VMMS = {"qemu": "QEMU", "firecracker": "Firecracker"}
_BAR_COLUMNS = 32
_EIGHTHS = " ▏▎▍▌▋▊▉"


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=100, metavar="N", help="how many children (default 100)")
    parser.add_argument("--engine", help="default: what doctor chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_demo(args: argparse.Namespace) -> int:
    n = parse_count(args.n)
    allow_open_files()
    home = find_home()
    engine = open_engine(args.engine)
    if engine.isolation == "none":
        raise InvalidInput(f"The engine {engine.name} runs no VM, and the demo is about VMs", hint="Leave --engine out")
    with Shown(quiet=args.json) as shown, session(home.runtime) as directory:
        shown.stage(f"engine {engine.name}, isolation {engine.isolation}")
        image = ImageStore(home).build(debian_spec(get_recipe("python")), "python", shown)
        store = SnapshotStore(home.snapshots)
        result = run_async(fork_and_measure(engine, store, image, n, directory, shown))
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print_screen(result, Console(highlight=False), find_program())
    if result.ok != n or result.distinct != n:
        raise ContractBroken(f"Of {n} children {result.ok} answered and {result.distinct} are distinct")
    return 0


def print_screen(result: Result, console: Console, program: str) -> None:
    """The result, and what to try next: at most 24 lines of 80 columns."""
    plain = not console.is_terminal or console.options.ascii_only
    bars = render_bars(result)
    longest = max(seconds for _, seconds, _ in bars)
    chart, facts, commands = (Table.grid(padding=(0, 2)) for _ in range(3))
    for label, seconds, text in bars:
        chart.add_row(label, f"[cyan]{render_bar(seconds / longest, plain=plain)}", text)
    for fact in render_facts(result):
        facts.add_row(*fact)
    for command in render_next(program):
        commands.add_row(*command)
    console.print(chart, "", facts, "", *render_verdict(result), "", "Try next:", commands, sep="\n")


def render_bars(result: Result) -> list[tuple[str, float, str]]:
    """What was timed, in seconds and as text."""
    faster = result.cold_boot_s / result.fork_one_s
    each_ms = result.fork_all_s / result.n * 1000
    return [
        ("cold boot of 1 VM", result.cold_boot_s, f"{result.cold_boot_s:.2f} s"),
        ("fork of 1", result.fork_one_s, f"{result.fork_one_s:.3f} s, {faster:.0f}x faster"),
        (f"fork of {result.n}", result.fork_all_s, f"{result.fork_all_s:.2f} s, {each_ms:.0f} ms each"),
    ]


def render_bar(share: float, *, plain: bool) -> str:
    """A share of the longest bar. Never empty."""
    eighths = max(1, math.ceil(share * _BAR_COLUMNS * 8))
    if plain:
        return "#" * math.ceil(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def render_facts(result: Result) -> list[tuple[str, str]]:
    facts = [
        ("per child, p50 / p99", f"{result.per_child_ms['p50']:.0f} ms / {result.per_child_ms['p99']:.0f} ms"),
        ("memory per child, unique", f"{result.unique_mib_per_child:.1f} MiB"),
        ("idle CPU per child", f"{result.idle_cpu_percent_per_child:.2f} % of a core"),
        ("children", render_way(result)),
    ]
    if result.template_s is not None and result.template_mib is not None:
        facts.append(("their template, made once", f"{result.template_s:.2f} s, {result.template_mib:.0f} MiB"))
    return facts


def render_way(result: Result) -> str:
    started = f"a {_VMMS.get(result.engine, 'VMM')} started for each"
    ways = {"fork": "forked from a template", "start": started}
    return ways.get(result.way, "forked from a template, and some started")


def render_verdict(result: Result) -> list[str]:
    return [
        f"{result.ok} of {result.n} VMs, each with its own kernel, answered {CODE}",
        f"{result.distinct} of {result.n} differ from all others in hostname, machine-id, entropy, random,",
        f"numpy.random and token. Engine {result.engine}, isolation {result.isolation}.",
        "Times end with the child's first evaluation.",
    ]


def render_next(program: str) -> list[tuple[str, str]]:
    """Commands that work after the demo, and what they do."""
    return [
        (f"  {program} fork {TAG} -n 3", "# three VMs"),
        (f"  {program} shell $({program} fork {TAG} -q)", "# a shell in one more"),
        (f"  {program} down", "# end all of them"),
    ]


def find_program() -> str:
    """How this command is called from here."""
    if shutil.which("forkd") or Path(sys.argv[0]).name != "forkd":
        return "forkd"
    return os.path.relpath(sys.argv[0])
