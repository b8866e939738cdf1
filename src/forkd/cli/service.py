"""`forkd up`, `forkd down`, `forkd status`: this user's daemon."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.cli.killing import kill_all
from forkd.cli.nouns import Nouns
from forkd.cli.reach import (
    ANSWER_DEADLINE_S,
    Address,
    add_daemon_options,
    find_address,
    find_running,
    open_controller,
)
from forkd.cli.tables import print_facts, print_json, render_size
from forkd.errors import Conflict, InvalidInput, Unreachable
from forkd.wire.api import TemplateInfo

if TYPE_CHECKING:
    from forkd.client.controller import Controller

_STATES = ("running", "paused", "starting", "stopping", "dead")
# For sandboxes that were just being forked.
_EMPTY_DEADLINE_S = 60.0
_POLL_S = 0.05


def add_up(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("up", help="start a daemon that stays", description="Start a daemon that stays.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run_up)


def add_down(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "end all sandboxes and the daemon"
    parser = nouns.add_parser("down", help=about, description="End all sandboxes and the daemon of this machine.")
    parser.add_argument("--keep", action="store_true", help="leave the sandboxes running, for the next daemon")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run_down)


def add_status(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "show the daemon and what it runs"
    description = f"Show the daemon and what it runs. Exits with {Unreachable.exit_code} when none answers."
    parser = nouns.add_parser("status", help=about, description=description)
    add_daemon_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run_status)


def run_up(args: argparse.Namespace) -> int:
    from forkd.cli.background import start_daemon

    address = _own_address("up")
    with open_controller(address, None, ANSWER_DEADLINE_S) as controller:
        if controller.ready():
            pid, started = controller.version()["pid"], False
        else:
            done = start_daemon(controller, address, idle_exit_s=0)
            pid, started = done.pid, done.own
    if args.json:
        print_json({"pid": pid, "started": started, "url": address.url})
    elif started:
        print(f"The daemon runs (pid {pid}) at {address.url}; to end it: forkd down")
    elif _ends_when_idle(pid):
        print(f"A daemon runs already (pid {pid}), and ends when idle; for one that stays: forkd down --keep, forkd up")
    else:
        print(f"A daemon runs already (pid {pid}) at {address.url}")
    return 0


def run_down(args: argparse.Namespace) -> int:
    from forkd.cli.background import stop_daemon

    _own_address("down")
    controller = find_running(argparse.Namespace(url=None, token=None))
    if controller is None:
        if args.json:
            print_json({"pid": None, "removed": 0})
        else:
            print("No daemon runs")
        return 0
    with controller:
        pid = controller.version()["pid"]
        removed = 0 if args.keep else _kill_all(controller)
        left = len(controller.list_sandboxes())
    stop_daemon(pid)
    if args.json:
        print_json({"pid": pid, "removed": removed})
        return 0
    ended = f"{_count(removed, 'sandbox', 'sandboxes')} ended, " if removed else ""
    kept = f"; {_count(left, 'sandbox goes', 'sandboxes go')} on" if left else ""
    print(f"{ended}the daemon (pid {pid}) is gone{kept}".capitalize())
    return 0


def run_status(args: argparse.Namespace) -> int:
    address = find_address(args.url)
    controller = find_running(args)
    if controller is None:
        if args.json:
            print_json({"running": False, "url": address.url})
        else:
            print(f"No daemon answers at {address.url}", file=sys.stderr)
            if address.own:
                print("hint: Start one with: forkd up", file=sys.stderr)
        return Unreachable.exit_code
    with controller:
        facts = collect_status(controller, address)
    if args.json:
        print_json(facts)
    else:
        print_facts(render_status(facts))
    return 0


def collect_status(controller: Controller, address: Address) -> dict[str, Any]:
    infos = controller.list_sandboxes()
    states: Counter[str] = Counter(info["state"] for info in infos)
    return {
        "running": True,
        "ready": controller.ready(),
        "url": address.url,
        **controller.version(),
        "sandboxes": {state: states[state] for state in _STATES},
        "snapshots": len(controller.list_snapshots()),
        "workspaces": len(controller.list_workspaces()),
        "templates": controller.list_templates(),
    }


def render_status(facts: dict[str, Any]) -> dict[str, str]:
    counts = [f"{number} {state}" for state, number in facts["sandboxes"].items() if number]
    return {
        "daemon": f"pid {facts['pid']}, version {facts['version']}" + ("" if facts["ready"] else ", recovering"),
        "engine": facts["engine"],
        "isolation": facts["isolation"],
        "listens on": ", ".join(facts["listeners"]),
        "sandboxes": ", ".join(counts) or "none",
        "snapshots": str(facts["snapshots"] or "none"),
        "workspaces": str(facts["workspaces"] or "none"),
        "templates": _render_templates(facts["templates"]),
    }


def _render_templates(infos: Sequence[TemplateInfo]) -> str:
    """How many, and what they hold in all."""
    held_bytes = sum(info["memory_bytes"] for info in infos)
    return f"{len(infos)}, {render_size(held_bytes)}" if infos else "none"


def _kill_all(controller: Controller) -> int:
    """Until none is left: some are just starting, and others may go on forking until the daemon is told to stop."""
    removed = 0
    deadline = time.monotonic() + _EMPTY_DEADLINE_S
    while found := controller.list_sandboxes():
        outcome = kill_all(controller, [info["id"] for info in found])
        removed += len(outcome.killed)
        for error in outcome.failed.values():
            if not isinstance(error, Conflict) or time.monotonic() > deadline:
                raise error
        if outcome.failed:
            time.sleep(_POLL_S)
    return removed


def _own_address(command: str) -> Address:
    address = find_address(None)
    if not address.own:
        raise InvalidInput(
            f"forkd {command} is about the daemon of this machine, and FORKD_URL names another",
            hint=f"Unset FORKD_URL for forkd {command}",
        )
    return address


def _ends_when_idle(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--idle-exit-secs" in words and words[words.index(b"--idle-exit-secs") + 1] != b"0"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
