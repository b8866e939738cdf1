"""`forkd inspect`, `timeout`: all that is known of sandboxes, and how long they may live."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from forkd.cli.arguments import add_daemon_options, parse_duration, render_pairs
from forkd.cli.connect import connect
from forkd.cli.network import render_line, render_ports
from forkd.cli.output import print_facts, print_json, print_lines, render_age, render_size, show
from forkd.cli.sandboxes import add_sandbox, print_sandboxes, render_deadline, resolve, resolve_all
from forkd.host.cell import NAMESPACES
from forkd.wire.api import CellInfo, SandboxInfo

_NO_DEADLINE = "none"


def add_inspect(parser: argparse.ArgumentParser) -> None:
    add_sandbox(parser, "+")
    add_daemon_options(parser, json="print a JSON array")


def run_inspect(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        found = [controller.get_sandbox(sandbox_id, cell=True) for sandbox_id in resolve_all(controller, args.sandbox)]
    return show(args, found, _print_all)


def _print_all(found: Sequence[SandboxInfo]) -> None:
    now = time.time()
    for number, info in enumerate(found):
        if number:
            print_lines([""])
        print_facts(render_facts(info, now))


def render_facts(info: SandboxInfo, now: float) -> dict[str, Any]:
    """Every field under its own name; times as people read them, nothing for what is not set."""
    facts: dict[str, Any] = {name: value for name, value in info.items() if value not in (None, {}, [])}
    for name in [name for name in facts if name.endswith("_unix")]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(facts[name])))
        facts[name] = f"{at}, {_render_distance(float(facts[name]), now)}"
    for name in ("labels", "metadata"):
        if name in facts:
            facts[name] = render_pairs(facts[name])
    facts["network"] = render_line(info["network"])
    if (usage := info["network"].get("usage")) is not None:
        received, sent = render_size(usage["bytes_in"]), render_size(usage["bytes_out"])
        facts["network_use"] = (
            f"received {received}, sent {sent}, {usage['connections']} open, {usage['refused']} refused"
        )
    if (cell := info.get("cell")) is not None:
        facts["cell"] = render_cell(cell)
    if info["ports"]:
        facts["ports"] = render_ports(info["ports"])
    if deadline := render_deadline(info, now):
        facts["deadline"] = deadline
    return facts


def render_cell(cell: CellInfo) -> str:
    """In a line: whether it is whole, and as whom it runs. The rest is in --json."""
    whole = f"lacks {', '.join(cell['lacks'])}" if cell["lacks"] else "whole"
    own = " ".join(cell["namespaces"]) or "nothing"
    shared = " ".join(name for name in NAMESPACES if name not in cell["namespaces"]) or "nothing"
    return f"{whole}; user {cell['user']}, own {own}, shared {shared}, {cell['filters']} filters"


def _render_distance(at_unix: float, now: float) -> str:
    return f"in {render_age(at_unix - now)}" if at_unix > now else f"{render_age(now - at_unix)} ago"


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Set how long a sandbox may live, from now on: forkd timeout web 10m. `none` takes its deadline away."
    )
    add_sandbox(parser)
    parser.add_argument("time", metavar="TIME", type=parse_deadline, help="such as 90, 30s, 5m, 2h or 1d; or none")
    parser.add_argument("--on-timeout", choices=("kill", "pause"), help="what happens then (default: as it was)")
    add_daemon_options(parser, json="print one JSON object")


def parse_deadline(text: str) -> float | None:
    return None if text == _NO_DEADLINE else parse_duration(text)


def run_timeout(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        info = controller.set_sandbox_timeout(resolve(controller, args.sandbox), args.time, args.on_timeout)
    if args.json:
        print_json(info)
    else:
        print_sandboxes([info])
    return 0
