"""A daemon on this machine, started when none runs and nobody named another: as the command line does.

Through the command line, in a process of its own: the client imports nothing of the server. It ends when it is idle.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys

from forkd.client.endpoint import has_unix_sockets
from forkd.errors import Unreachable
from forkd.wire.endpoint import find_socket

START_S = 90.0  # the command itself gives the daemon 60
# A command that needs a daemon, and does nothing else.
_COMMAND = ("-m", "forkd.cli.main", "ls", "--json")
_SERVER = ("pydantic", "uvicorn")

_log = logging.getLogger("forkd")


def can_start() -> bool:
    return sys.platform.startswith("linux") and has_unix_sockets() and find_socket() is not None


def start_daemon() -> None:
    """Returns when one is ready."""
    if any(importlib.util.find_spec(name) is None for name in _SERVER):
        raise _not_started(
            "this Python has the SDK, but not the daemon",
            "Install the daemon from a checkout with: pip install '.[server]'. Or set FORKD_URL to another daemon",
        )
    command = [sys.executable, *_COMMAND]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_started(str(error), "To see why: forkd serve") from None
    if done.returncode != 0:
        raise parse_failure(done.stdout or done.stderr)
    _log.info("%s", done.stderr.strip())


async def async_start_daemon() -> None:
    import asyncio  # the synchronous client does not pay for it

    await asyncio.to_thread(start_daemon)


def parse_failure(said: str) -> Unreachable:
    """From the error that the command printed."""
    try:
        body = json.loads(said)
        return _not_started(body["error"], body["hint"], body["details"])
    except (ValueError, KeyError, TypeError):
        return _not_started(said.strip()[-500:] or "no reason given", "To see why: forkd serve")


def _not_started(reason: str, hint: str | None, details: str | None = None) -> Unreachable:
    message = f"No forkd daemon runs here, and none could be started: {reason}"
    error = Unreachable(message, hint=hint, details=details)
    error.sent = False
    return error
