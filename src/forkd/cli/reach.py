"""The way to the daemon: where it is, and one started in the background when none answers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from forkd.errors import Unreachable
from forkd.wire.endpoint import DEFAULT_BIND, find_socket

if TYPE_CHECKING:
    from forkd.client.controller import Controller

# For one answer. A daemon that has this much to do is as good as none, except where a command says otherwise.
ANSWER_DEADLINE_S = 60.0
IDLE_EXIT_S = 300


@dataclass(frozen=True)
class Address:
    """Where to ask, and whether it is this user's own daemon, which may be started and stopped."""

    url: str
    own: bool
    socket: Path | None = None


def add_daemon_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the daemon (default: FORKD_URL, else the one on this machine)")
    parser.add_argument("--token", metavar="TOKEN", help="its token; FORKD_TOKEN keeps it out of the process list")


def find_address(url: str | None, environ: Mapping[str, str] = os.environ) -> Address:
    """What was given, else FORKD_URL, else the unix socket, else (where that is switched off) TCP on this machine."""
    given = url or environ.get("FORKD_URL")
    if given:
        return Address(given, own=False)
    socket = find_socket(environ)
    if socket is not None:
        return Address(f"unix://{quote(str(socket))}", own=True, socket=socket)
    return Address(f"http://{environ.get('FORKD_BIND') or DEFAULT_BIND}", own=True)


def connect(args: argparse.Namespace, *, timeout_s: float = ANSWER_DEADLINE_S) -> Controller:
    """A controller whose daemon answers. Starts one where no other is named, and says so."""
    address = find_address(args.url)
    controller = open_controller(address, args.token, timeout_s)
    try:
        if address.own and not controller.ready():
            if not sys.platform.startswith("linux"):
                raise Unreachable(
                    f"No daemon answers at {address.url}", hint="Daemons run on Linux: name one with --url or FORKD_URL"
                )
            from forkd.cli.background import start_daemon

            started = start_daemon(controller, address, idle_exit_s=IDLE_EXIT_S)
            if started.own:
                print(
                    f"forkd: started a daemon (pid {started.pid}), which ends after {IDLE_EXIT_S} s without sandboxes;"
                    " to end it now: forkd down",
                    file=sys.stderr,
                )
    except BaseException:
        controller.close()
        raise
    return controller


def find_running(args: argparse.Namespace) -> Controller | None:
    """A controller whose daemon answers, or None; never starts one."""
    controller = open_controller(find_address(args.url), args.token, ANSWER_DEADLINE_S)
    try:
        if controller.healthy():
            return controller
    except Unreachable:
        pass
    except BaseException:
        controller.close()
        raise
    controller.close()
    return None


def open_controller(address: Address, token: str | None, timeout_s: float) -> Controller:
    # httpx imports a command line of its own, with click and pygments, where those are installed: a third of its time.
    # A None makes that import fail, which httpx expects.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

    from forkd.client.controller import Controller

    return Controller(address.url, token, timeout_s)
