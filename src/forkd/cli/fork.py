"""`forkd fork`: sandboxes from a snapshot, or from where a sandbox is.

They stay, or with `--settle-secs` live as long as this command.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import (
    add_daemon_options,
    add_duration,
    add_limit_options,
    add_pairs,
    parse_environment,
    parse_pairs,
    render_limits,
)
from forkd.cli.connect import connect
from forkd.cli.interrupts import Interrupts
from forkd.cli.network import add_network_options, parse_options
from forkd.cli.output import note, print_json
from forkd.cli.sandboxes import kill_all, resolve, show_sandboxes
from forkd.cli.suggestions import suggesting_snapshot
from forkd.errors import ForkdError, InvalidInput, NotFound, Unreachable
from forkd.model.machine import parse_count
from forkd.model.names import parse_tag
from forkd.wire.api import SandboxInfo
from forkd.wire.endpoint import find_loopback_port

if TYPE_CHECKING:
    from forkd.client import Controller

# When a command with `--settle-secs` is killed outright, the daemon ends its children this much later.
_SETTLE_SLACK_S = 60.0
_FORKDS = ("per_child_netns", "prewarm", "live_fork", "hugepages")  # options of forkd's


def add_fork(parser: argparse.ArgumentParser) -> None:
    parser.description = "Fork a snapshot, or a running sandbox where it is, into sandboxes: all of them, or none."
    parser.add_argument("snapshot", nargs="?", metavar="TAG", help="the snapshot")
    parser.add_argument("--tag", metavar="TAG", help="the same, as an option; with --from: keep its branch as this")
    parser.add_argument("--from", dest="source", metavar="SANDBOX", help="fork this running sandbox instead")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="how many (default 1)")
    add_duration(parser, "--timeout", "how long they may live, such as 90, 5m or 2h (default: no limit)")
    parser.add_argument("--on-timeout", choices=("kill", "pause"), help="what happens then (default kill)")
    add_pairs(parser, "-e", "--env", about="a variable for the guest; a KEY alone takes the value it has here")
    add_pairs(parser, "-l", "--label", about="a label; may be repeated")
    add_pairs(parser, "--metadata", about="metadata; may be repeated")
    add_limit_options(parser)
    add_network_options(parser)
    parser.add_argument("--allow-partial", action="store_true", help="keep those that come up when others do not")
    add_duration(parser, "--settle-secs", "end them after this time, or when this command ends; it waits until then")
    for name in _FORKDS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", action="store_true", help="for compatibility; see docs/reference/rest.md"
        )
    parser.add_argument("-q", "--quiet", action="store_true", help="print ids only")
    add_daemon_options(parser, json="print a JSON array")


def run_fork(args: argparse.Namespace) -> int:
    request = render_request(args, os.environ)
    with connect(args) as controller, Interrupts() as interrupts:
        if args.source is not None:
            request["sandbox_id"] = resolve(controller, args.source)
        begun = time.monotonic()
        with forked(args, controller, request) as infos:
            took_ms = (time.monotonic() - begun) * 1000
            if args.settle_secs is not None:
                _settle(args, controller, infos, took_ms)
                end_all(controller, infos)
            interrupts.settle()
    if args.settle_secs is None:
        _print(args, infos, took_ms)
    return 0


@contextmanager
def forked(
    args: argparse.Namespace, controller: Controller, request: dict[str, Any], *, keep: bool = False
) -> Iterator[list[SandboxInfo]]:
    """What the request makes. Removed when the block fails or is interrupted, at any point, unless it is to `keep`."""
    key = f"cli-{secrets.token_hex(16)}"
    infos: list[SandboxInfo] | None = None
    try:
        if "sandbox_id" in request:
            infos = controller.fork_sandbox(**request, idempotency_key=key)
        else:
            with suggesting_snapshot(controller, request["snapshot_tag"]):
                infos = controller.spawn_sandboxes(**request, idempotency_key=key)
        yield infos
    except BaseException as error:
        refused = infos is None and isinstance(error, ForkdError) and not isinstance(error, Unreachable)
        if infos is not None and keep:
            note_kept(infos)
        elif not refused:
            _undo(args, key)
        raise


def note_kept(infos: list[SandboxInfo]) -> None:
    ids = " ".join(info["id"] for info in infos)
    note(f"forkd: kept {ids}; remove it with: forkd rm {ids}")


def _undo(args: argparse.Namespace, key: str) -> None:
    """Removes what the request made, which may still be in progress; nothing is made by that.

    The old connection was interrupted at an unknown point and is not used again.
    """
    try:
        with connect(args) as controller:
            controller.cancel_spawn(key)
    except ForkdError as error:
        error.hint = "Some sandboxes may still run. List them with: forkd ls"
        raise


def render_request(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `spawn_sandboxes`; with `--from` those of `fork_sandbox`, but for the id."""
    n = parse_count(args.n)
    settling = args.settle_secs is not None
    timeout_s = args.timeout
    if settling and timeout_s is None:
        timeout_s = _check_settling(args.settle_secs) + _SETTLE_SLACK_S
    common = {
        **render_limits(args),
        "network": parse_options(args),
        "timeout_secs": timeout_s,
        "on_timeout": args.on_timeout,
        "env": parse_environment(args.env, environ),
        "labels": parse_pairs(args.label, "--label"),
        "metadata": parse_pairs(args.metadata, "--metadata"),
    }
    if args.source is not None:
        _refuse_with_source(args)
        return {"count": n, "tag": None if args.tag is None else parse_tag(args.tag), **common}
    if (args.snapshot is None) == (args.tag is None):
        raise InvalidInput(
            f"forkd fork takes one snapshot, got {'none' if args.tag is None else 'two'}",
            hint="Write: forkd fork TAG. List the snapshots with: forkd snapshot ls",
        )
    return {
        "snapshot_tag": parse_tag(args.snapshot if args.tag is None else args.tag),
        "n": n,
        "per_child_netns": args.per_child_netns,
        "prewarm": args.prewarm,
        "live_fork": args.live_fork,
        "hugepages": args.hugepages,
        **common,
        "allow_partial": args.allow_partial,
        # forkd's SDK looks for its one child there.
        "agent_port": parse_target(environ.get("FORKD_TARGET")) if settling and n == 1 else None,
    }


def _refuse_with_source(args: argparse.Namespace) -> None:
    if args.snapshot is not None:
        raise InvalidInput("--from takes the place of a snapshot, got both", hint="Write: forkd fork --from SANDBOX")
    for name in ("allow_partial", *_FORKDS):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise InvalidInput(f"--from and --{option} cannot be combined", hint=f"Leave --{option} out")


def parse_target(text: str | None) -> int | None:
    """The port of FORKD_TARGET. Agents are reached through this machine's loopback, and only there."""
    if not text:
        return None
    port = find_loopback_port(text)
    if port is None:
        raise InvalidInput(
            f"FORKD_TARGET must be a port of 127.0.0.1, got {text!a}",
            hint="Use a free port, such as 127.0.0.1:8888",
        )
    return port


def _check_settling(settle_s: float) -> float:
    if not 0 <= settle_s <= 30 * 86400:
        raise InvalidInput(
            f"--settle-secs must be between 0 and 2592000, got {settle_s:g}", hint="The longest is 30 days"
        )
    return settle_s


def _settle(args: argparse.Namespace, controller: Controller, infos: list[SandboxInfo], took_ms: float) -> None:
    """Prints the same lines as forkd: programs read the fourth word of the first."""
    until = time.monotonic() + args.settle_secs
    if args.json:
        print_json(infos)
    else:
        print(f"total wall-clock time: {took_ms:.0f} ms")
    sys.stdout.flush()
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(left_s)
    if not args.json:
        running = {info["id"] for info in controller.list_sandboxes(state="running")}
        print(f"{sum(info['id'] in running for info in infos)} / {args.n} children alive")


def end_all(controller: Controller, infos: list[SandboxInfo]) -> None:
    for sandbox_id, error in kill_all(controller, [info["id"] for info in infos]).items():
        if not isinstance(error, NotFound):
            note(f"warning: {sandbox_id} could not be ended: {error.message}")


def _print(args: argparse.Namespace, infos: list[SandboxInfo], took_ms: float) -> None:
    show_sandboxes(args, infos)
    if not args.json and not args.quiet:
        note(f"forked {len(infos)} in {took_ms:.0f} ms")
    if len(infos) < args.n:
        note(f"warning: {args.n - len(infos)} of {args.n} did not come up")
