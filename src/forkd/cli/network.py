"""`forkd network`, `port`: what a sandbox may reach, and which of its ports this host reaches."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from forkd.cli.arguments import add_daemon_options, parse_size
from forkd.cli.connect import connect
from forkd.cli.output import note, print_facts, print_rows, render_size, show
from forkd.cli.sandboxes import add_sandbox, resolve
from forkd.errors import InvalidInput
from forkd.model.network import PRESETS, Network
from forkd.wire.api import NetworkInfo, PortInfo

_PRESETS = "presets"
_OPTIONS = ("network", "allow", "deny", "max_bytes", "max_connections", "group")


def add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=("none", "open"), help="no network, or the public one (default: none)")
    parser.add_argument(
        "--allow",
        action="append",
        metavar="RULE",
        help="allow only this: a preset such as pypi, a domain, *.domain, an address or a range, with :port behind it "
        "if wanted; may be repeated",
    )
    parser.add_argument("--deny", action="append", metavar="RULE", help="but not this; may be repeated")
    parser.add_argument(
        "--max-bytes", type=parse_size, metavar="SIZE", help="it may send and receive so much in all, such as 500M"
    )
    parser.add_argument("--max-connections", type=int, metavar="N", help="it may have so many open at once")
    parser.add_argument("--group", metavar="NAME", help="it reaches other sandboxes of this group, and they reach it")


def parse_options(args: argparse.Namespace) -> Network | None:
    """None where none was given: then it is that of the snapshot, or of what it is forked from."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if not given:
        return None
    mode = given.pop("network", None)
    if mode is None and set(given) <= {"deny", "max_bytes", "max_connections"}:
        raise InvalidInput("These options need a network", hint="Add --allow RULE, --group NAME or --network open")
    return Network(mode, **given)


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the network of a sandbox and what it used; with options, change it while it runs. "
        "`forkd network presets` lists the presets and their domains."
    )
    add_sandbox(parser)
    add_network_options(parser)
    add_daemon_options(parser, json="print one JSON object")


def run_network(args: argparse.Namespace) -> int:
    network = parse_options(args)
    if args.sandbox == _PRESETS and network is None:
        return show(args, {name: list(domains) for name, domains in PRESETS.items()}, _print_presets)
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        info = (
            controller.get_sandbox(sandbox_id)
            if network is None
            else controller.set_sandbox_network(sandbox_id, network)
        )
    return show(args, info["network"], lambda shown: print_facts(render_network(shown)))


def _print_presets(presets: Mapping[str, Sequence[str]]) -> None:
    print_rows(("PRESET", "DOMAINS"), ((name, " ".join(domains)) for name, domains in presets.items()))


def render_network(info: NetworkInfo) -> dict[str, Any]:
    """In words: every field that says something."""
    facts: dict[str, Any] = {"mode": info["mode"]}
    facts |= {name: " ".join(info[name]) for name in ("allow", "deny") if info[name]}
    if info["max_bytes"] is not None:
        facts["max_bytes"] = f"{info['max_bytes']} ({render_size(info['max_bytes'])})"
    for name in ("max_connections", "group", "address"):
        if info.get(name) is not None:
            facts[name] = info[name]
    if (usage := info.get("usage")) is not None:
        facts["received"], facts["sent"] = render_size(usage["bytes_in"]), render_size(usage["bytes_out"])
        facts["connections"], facts["refused"] = usage["connections"], usage["refused"]
    return facts


def render_line(network: NetworkInfo) -> str:
    """The mode, and what is allowed."""
    words = [network["mode"], *network["allow"], *(f"not {rule}" for rule in network["deny"])]
    return " ".join([*words, *([] if network["group"] is None else [f"group {network['group']}"])])


def render_ports(ports: Sequence[PortInfo]) -> str:
    return " ".join(f"{each['address']}:{each['host_port']}->{each['port']}" for each in ports)


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a port of a sandbox reachable at 127.0.0.1: forkd port web 8000. Without a port, list those there are."
    )
    add_sandbox(parser)
    parser.add_argument("port", nargs="?", type=int, metavar="PORT", help="a port in the sandbox")
    parser.add_argument("--host-port", type=int, metavar="N", help="listen there (default: any free port)")
    parser.add_argument("--anyone", action="store_true", help="for every user of this machine, not only yours and root")
    parser.add_argument("--close", action="store_true", help="end it")
    add_daemon_options(parser)


def run_port(args: argparse.Namespace) -> int:
    if args.port is None and (args.close or args.host_port is not None or args.anyone):
        raise InvalidInput("forkd port needs a port for these options", hint="Write: forkd port SANDBOX 8000")
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        if args.close:
            controller.close_port(sandbox_id, args.port)
            return show(args, {"closed": args.port})
        if args.port is None:
            found = controller.list_ports(sandbox_id)
        else:
            found = [controller.expose_port(sandbox_id, args.port, args.host_port, anyone=args.anyone)]
    show(args, found, _print_ports)
    if not found and not args.json:
        note(f"No port is exposed; expose one with: forkd port {args.sandbox} PORT")
    return 0


def _print_ports(found: Sequence[PortInfo]) -> None:
    rows = (
        (str(each["port"]), f"{each['address']}:{each['host_port']}", "anyone" if each["anyone"] else "root and you")
        for each in found
    )
    print_rows(("PORT", "ADDRESS", "FOR"), rows)
