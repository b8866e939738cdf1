"""`forkd serve`, `up`, `down`, `status`: the daemon."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_daemon_options, add_json
from forkd.cli.connect import Address, find_address, find_running, open_controller
from forkd.cli.output import note, print_facts, print_json, render_size, show
from forkd.cli.sandboxes import kill_all
from forkd.errors import Conflict, InvalidInput, Unreachable
from forkd.wire.api import TcpState, TemplateInfo

if TYPE_CHECKING:
    from forkd.client import Controller

_STATES = ("running", "paused", "starting", "stopping", "dead")
# For sandboxes that were just being forked.
_EMPTY_DEADLINE_S = 60.0
_POLL_S = 0.05
_TCP: Mapping[TcpState, str] = {
    "open": "NO TOKEN is needed: every user of this machine can use it; to change that: forkd token create NAME",
    "token": "a token is needed",
    "locked": "nobody is let in, as no token is left; to make one: forkd token create NAME",
}


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
    parser.description = (
        "Start the daemon in the background, where it stays; one that runs already stays as well. "
        "It listens on TCP only with --bind, or if its settings have bind or tls_cert."
    )
    parser.add_argument("--bind", metavar="ADDRESS:PORT", help="listen on this TCP address too")
    add_json(parser, "print one JSON object")


def run_up(args: argparse.Namespace) -> int:
    from forkd.cli.background import start_daemon

    address = _own_address("up")
    with open_controller(address) as controller:
        started = (
            None
            if controller.ready()
            else start_daemon(controller, address, idle_exit_s=0, bind=args.bind or _find_bind())
        )
        if started is None or not started.own:
            controller.stay()
        facts = controller.version()
    if started is None and args.bind and not _listens_on(args.bind, facts["listeners"]):
        raise Conflict(
            f"A daemon runs already (pid {facts['pid']}), and does not listen on {args.bind}",
            hint="End it and keep its sandboxes with: forkd down --keep. Then: forkd up --bind " + args.bind,
        )
    pid, own = facts["pid"], started is not None and started.own
    if args.json:
        print_json({"pid": pid, "started": own, "url": address.url})
    elif own:
        print(f"The daemon runs (pid {pid}) at {address.url}; to stop it: forkd down")
    else:
        print(f"A daemon runs already (pid {pid}) at {address.url}, and stays; to stop it: forkd down")
    if not args.json:
        _warn_of_access(facts["tcp_access"], facts["listeners"])
    return 0


def _find_bind() -> str | None:
    """None: the settings say where to listen on TCP. If they do not, there is none."""
    from forkd.cli.background import NO_TCP
    from forkd.daemon.settings import find_config, read_config
    from forkd.host.paths import find_home

    path, required = find_config({}, os.environ, find_home())
    file = read_config(path, required=required)
    said = any(key in file or os.environ.get(f"FORKD_{key.upper()}") for key in ("bind", "tls_cert"))
    return None if said else NO_TCP


def _listens_on(bind: str, listeners: list[str]) -> bool:
    return any(place.partition("://")[2] == bind for place in listeners)


def _warn_of_access(tcp_access: TcpState, listeners: list[str]) -> None:
    if tcp_access == "open":
        note(
            f"warning: Every user of this machine can use the daemon at {listeners[-1]}, which asks for no token\n"
            "hint: Make a token with: forkd token create NAME"
        )


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
        "daemon": _render_daemon(facts),
        "home": facts.get("home", "unknown"),
        "engine": facts["engine"],
        "isolation": facts["isolation"],
        "listens on": ", ".join(facts["listeners"]),
        **({"TCP": said} if (said := _TCP.get(facts.get("tcp_access", "off"))) else {}),
        "sandboxes": ", ".join(counts) or "none",
        "snapshots": str(facts["snapshots"] or "none"),
        "workspaces": str(facts["workspaces"] or "none"),
        "templates": f"{len(templates)}, {held}" if templates else "none",
    }
    print_facts(shown)


def _render_daemon(facts: dict[str, Any]) -> str:
    said = f"pid {facts['pid']}, version {facts['version']}"
    if facts.get("idle_exit_secs"):  # an older daemon does not say
        said += f", ends after {facts['idle_exit_secs']:g} s without sandboxes"
    return said if facts["ready"] else f"{said}, recovering"


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


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
