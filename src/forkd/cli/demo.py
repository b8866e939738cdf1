"""`forkd demo`: from nothing to n forked VMs, with the figures."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.errors import ContractBroken, InvalidInput
from forkd.host.capacity import allow_open_files
from forkd.host.paths import find_home
from forkd.image import ImageStore, debian_spec, get_recipe
from forkd.model.machine import parse_count
from forkd.runtime.demo import CODE, Result, run_demo
from forkd.runtime.engines import open_engine
from forkd.runtime.session import session
from forkd.store.snapshots import SnapshotStore

_VMMS = {"qemu": "QEMU", "firecracker": "Firecracker"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("demo", help="fork one warmed VM into 100 and show what it cost")
    parser.add_argument("-n", type=int, default=100, metavar="N", help="how many children (default 100)")
    parser.add_argument("--engine", help="default: what doctor chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
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
        result = run_async(run_demo(engine, store, image, n, directory, shown))
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        _print_table(result)
    if result.ok != n or result.distinct != n:
        raise ContractBroken(f"Of {n} children {result.ok} answered and {result.distinct} are distinct")
    return 0


def render_way(result: Result) -> str:
    started = f"a {_VMMS.get(result.engine, 'VMM')} started for each"
    ways = {"fork": "forked from a template", "start": started}
    return ways.get(result.way, "forked from a template, and some started")


def _print_table(result: Result) -> None:
    console = Console(highlight=False)
    table = Table("what", "measured", box=None, pad_edge=False, header_style="bold")
    faster = result.cold_boot_s / result.fork_one_s
    rows = [
        ("cold boot of one VM, numpy imported", f"{result.cold_boot_s:.2f} s"),
        ("fork of 1", f"{result.fork_one_s:.3f} s   ({faster:.0f}x faster)"),
        (f"fork of {result.n}", f"{result.fork_all_s:.2f} s"),
        ("per child, p50 / p99", f"{result.per_child_ms['p50']:.0f} ms / {result.per_child_ms['p99']:.0f} ms"),
        ("memory per child, unique", f"{result.unique_mib_per_child:.1f} MiB"),
        ("idle CPU per child", f"{result.idle_cpu_percent_per_child:.2f} % of a core"),
        ("children", render_way(result)),
    ]
    if result.template_s is not None and result.template_mib is not None:
        rows.append(("their template, made once", f"{result.template_s:.2f} s, {result.template_mib:.0f} MiB"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        f"\n{result.ok} of {result.n} VMs, each with its own kernel, answered {CODE}\n"
        f"{result.distinct} of {result.n} differ from all others in hostname, machine-id, entropy, random, "
        f"numpy.random and token",
        soft_wrap=True,
    )
    console.print(f"engine {result.engine}, isolation {result.isolation}. Times end with the child's first evaluation.")
