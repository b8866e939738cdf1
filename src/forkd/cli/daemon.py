"""`forkd serve`, `up`, `down`, `status`: the daemon."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_daemon_options, add_json
from forkd.cli.connect import Address, find_address, find_running, open_controller
from forkd.cli.output import note, print_facts, print_json, render_size, show
from forkd.cli.sandboxes import kill_all
from forkd.errors import Conflict, InvalidInput, Unreachable
from forkd.wire.api import TemplateInfo

if TYPE_CHECKING:
    from forkd.client import Controller

_STATES = ("running", "paused", "starting", "stopping", "dead")
# For sandboxes that were just being forked.
_EMPTY_DEADLINE_S = 60.0
_POLL_S = 0.05


def add_serve(parser: argparse.ArgumentParser) -> None:
    from forkd.daemon.settings import CONFIG_VARIABLE, OPTIONS

    parser.description = (
        "Run the daemon in the foreground. Every option can also be set by its environment variable or in the settings "
        "file; a flag wins over the variable, the variable over the file."
    )
    parser.add_argument("--config", metavar="PATH", help=f"the settings file, TOML [{CONFIG_VARIABLE}]")
    for option in OPTIONS:
        parser.add_argument(option.flag, metavar=option.metavar, help=f"{option.help} [{option.variable}]")


def run_serve(args: argparse.Namespace) -> int:
    from forkd.daemon.serve import serve
    from forkd.daemon.settings import OPTIONS, read_settings
    from forkd.host.paths import find_home

    home = find_home()
    flags = {key: getattr(args, key) for key in ("config", *(option.key for option in OPTIONS))}
    return serve(home, read_settings(flags, os.environ, home))


def add_up(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "print one JSON object")


def run_up(args: argparse.Namespace) -> int:
    from forkd.cli.background import start_daemon

    address = _own_address("up")
    with open_controller(address) as controller:
        if controller.ready():
            pid, started = controller.version()["pid"], False
        else:
            done = start_daemon(controller, address, idle_exit_s=0)
            pid, started = done.pid, done.own
    if args.json:
        print_json({"pid": pid, "started": started, "url": address.url})
    elif started:
        print(f"The daemon runs (pid {pid}) at {address.url}; to stop it: forkd down")
    elif _ends_when_idle(pid):
        print(f"A daemon runs already (pid {pid}), and ends when idle; for one that stays: forkd down --keep, forkd up")
    else:
        print(f"A daemon runs already (pid {pid}) at {address.url}")
    return 0


def add_down(parser: argparse.ArgumentParser) -> None:
    parser.description = "End all sandboxes and stop the daemon of this machine."
    parser.add_argument("--keep", action="store_true", help="leave the sandboxes running, for the next daemon")
    add_json(parser, "print one JSON object")


def run_down(args: argparse.Namespace) -> int:
    from forkd.cli.background import stop_daemon

    _own_address("down")
    controller = find_running()
    if controller is None:
        return show(args, {"pid": None, "removed": 0}, lambda _: print("No daemon runs"))
    with controller:
        pid = controller.version()["pid"]
        removed = 0 if args.keep else _kill_all(controller)
        left = len(controller.list_sandboxes())
    stop_daemon(pid)
    ended = f"{_count(removed, 'sandbox', 'sandboxes')} ended, " if removed else ""
    kept = f"; {_count(left, 'sandbox keeps', 'sandboxes keep')} running" if left else ""
    said = f"{ended}the daemon (pid {pid}) stopped{kept}".capitalize()
    return show(args, {"pid": pid, "removed": removed}, lambda _: print(said))


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Show the daemon and what it runs. Exits with {Unreachable.exit_code} when none answers."
    add_daemon_options(parser, json="print one JSON object")


def run_status(args: argparse.Namespace) -> int:
    address = find_address(args.url)
    controller = find_running(args.url, args.token)
    if controller is None:
        if args.json:
            print_json({"running": False, "url": address.url})
        else:
            note(f"No daemon answers at {address.url}")
            if address.own:
                note("hint: Start one with: forkd up")
        return Unreachable.exit_code
    with controller:
        facts = _collect_status(controller, address)
    return show(args, facts, _print_status)


def _collect_status(controller: Controller, address: Address) -> dict[str, Any]:
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


def _print_status(facts: dict[str, Any]) -> None:
    counts = [f"{number} {state}" for state, number in facts["sandboxes"].items() if number]
    templates: list[TemplateInfo] = facts["templates"]
    held = render_size(sum(info["memory_bytes"] for info in templates))
    shown = {
        "daemon": f"pid {facts['pid']}, version {facts['version']}" + ("" if facts["ready"] else ", recovering"),
        "engine": facts["engine"],
        "isolation": facts["isolation"],
        "listens on": ", ".join(facts["listeners"]),
        "sandboxes": ", ".join(counts) or "none",
        "snapshots": str(facts["snapshots"] or "none"),
        "workspaces": str(facts["workspaces"] or "none"),
        "templates": f"{len(templates)}, {held}" if templates else "none",
    }
    print_facts(shown)


def _kill_all(controller: Controller) -> int:
    """Repeats until none is left: some are just starting, and others may fork more until the daemon stops."""
    removed = 0
    deadline = time.monotonic() + _EMPTY_DEADLINE_S
    while found := controller.list_sandboxes():
        failed = kill_all(controller, [info["id"] for info in found])
        removed += len(found) - len(failed)
        for error in failed.values():
            if not isinstance(error, Conflict) or time.monotonic() > deadline:
                raise error
        if failed:
            time.sleep(_POLL_S)
    return removed


def _own_address(command: str) -> Address:
    address = find_address(None)
    if not address.own:
        raise InvalidInput(
            f"forkd {command} is for the daemon of this machine, and FORKD_URL names another",
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
