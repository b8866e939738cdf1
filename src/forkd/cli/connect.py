"""Connecting to the daemon: where it listens, and starting one in the background when none answers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from forkd.cli.output import note
from forkd.errors import Unreachable
from forkd.wire.endpoint import DEFAULT_BIND, find_socket

if TYPE_CHECKING:
    from forkd.client import Controller

# For one answer, unless a command sets its own.
ANSWER_DEADLINE_S = 60.0
IDLE_EXIT_S = 300


@dataclass(frozen=True)
class Address:
    """Where the daemon listens; `own` is this user's daemon, which may be started and stopped."""

    url: str
    own: bool
    socket: Path | None = None


def find_address(url: str | None, environ: Mapping[str, str] = os.environ) -> Address:
    """The url given, else FORKD_URL, else the unix socket, else (when that is off) TCP on this machine."""
    given = url or environ.get("FORKD_URL")
    if given:
        return Address(given, own=False)
    socket = find_socket(environ)
    if socket is not None:
        return Address(f"unix://{quote(str(socket))}", own=True, socket=socket)
    return Address(f"http://{environ.get('FORKD_BIND') or DEFAULT_BIND}", own=True)


def connect(args: argparse.Namespace, *, timeout_s: float = ANSWER_DEADLINE_S) -> Controller:
    """A controller whose daemon answers. When no daemon is named and none runs, one is started, with a note."""
    address = find_address(args.url)
    controller = open_controller(address, args.token, timeout_s)
    try:
        if address.own and not controller.ready():
            if not sys.platform.startswith("linux"):
                raise Unreachable(
                    f"No daemon answers at {address.url}",
                    hint="A daemon needs Linux: name one with --url or FORKD_URL",
                )
            from forkd.cli.background import start_daemon

            started = start_daemon(controller, address, idle_exit_s=IDLE_EXIT_S)
            if started.own:
                note(
                    f"forkd: started a daemon (pid {started.pid}), which ends after {IDLE_EXIT_S} s without sandboxes;"
                    " to end it now: forkd down"
                )
    except BaseException:
        controller.close()
        raise
    return controller


def find_running(url: str | None = None, token: str | None = None) -> Controller | None:
    """A controller whose daemon answers, or None; never starts one."""
    controller = open_controller(find_address(url), token)
    running = False
    try:
        with suppress(Unreachable):
            running = controller.healthy()
    finally:
        if not running:
            controller.close()
    return controller if running else None


def remove_all(names: Iterable[str], get: Callable[[str], object], delete: Callable[[str], object]) -> list[str]:
    """All of them, or none when one is not there. Returns each name once."""
    unique = list(dict.fromkeys(names))
    for name in unique:
        get(name)
    for name in unique:
        delete(name)
    return unique


def open_controller(address: Address, token: str | None = None, timeout_s: float = ANSWER_DEADLINE_S) -> Controller:
    # Where click and pygments are installed, httpx imports its own command line: a third of its import time.
    # A None makes that import fail, which httpx expects.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

    from forkd.client import Controller

    return Controller(address.url, token, timeout_s)
