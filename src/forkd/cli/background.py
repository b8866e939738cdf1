"""A daemon in the background: started detached from this terminal, waited for, ended."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.cli.connect import Address
from forkd.errors import Conflict, EngineFailed, ForkdError, HostLacks, Unreachable
from forkd.host.paths import DAEMON_LOCK, Home, ensure_home, find_home

if TYPE_CHECKING:
    from forkd.client import Controller

LOG_NAME = "daemon.log"
# Nobody asked for TCP, where other users of this machine come in as well, unless there are tokens.
NO_TCP = "none"
# On a busy machine it takes seconds to recover many sandboxes and to prove that KVM works.
START_DEADLINE_S = 60.0
# The daemon drains its requests for up to 30 s.
STOP_DEADLINE_S = 60.0
_POLL_S = 0.02
# After a conflict: when another daemon has this home, it has written its lock by then; else the conflict was about
# something else, such as the TCP port.
_BEATEN_S = 1.0
_LOG_LINES = 15
_LOG_KEPT_BYTES = 1 << 20
# Addresses of another daemon, and what belongs to the process that started us.
_NOT_FOR_IT = ("FORKD_URL", "FORKD_TOKEN", "FORKD_TARGET", "NOTIFY_SOCKET")
# Settings that name files, relative to the user's directory; the daemon runs in another.
_PATHS = ("FORKD_CONFIG", "FORKD_TLS_CERT", "FORKD_TLS_KEY", "FORKD_TOKEN_FILE", "FORKD_AUDIT_LOG")


@dataclass(frozen=True)
class Started:
    pid: int
    own: bool  # False: another daemon, started at the same time, was first


def start_daemon(controller: Controller, address: Address, *, idle_exit_s: int, bind: str | None = NO_TCP) -> Started:
    """Returns when a daemon at this address is ready: this one, or one that was started at the same time.

    `bind` is where it listens on TCP; None: as its settings say.
    """
    home = find_home()
    log = home.root / LOG_NAME
    try:
        ensure_home(home.root)
        begun_at = _rotate(log)
        process = _spawn(render_command(address, idle_exit_s, bind), render_environment(os.environ, home), log)
    except OSError as error:
        raise HostLacks(
            f"{log} cannot be written: {error.strerror}", hint="Set FORKD_HOME to a directory that you can write to"
        ) from error
    deadline = time.monotonic() + START_DEADLINE_S
    lost_at = math.inf
    while not _is_ready(controller):
        now, status = time.monotonic(), process.poll()
        if status is not None:
            lost_at = min(lost_at, now)
            beaten = status == Conflict.exit_code and (now < lost_at + _BEATEN_S or is_owned(home))
            if not beaten:
                raise _died(process.pid, status, log, begun_at)
        if now > deadline:
            raise _not_ready(process, log, begun_at)
        time.sleep(_POLL_S)
    pid = controller.version()["pid"]
    if pid != process.pid and process.poll() is None:
        process.terminate()  # it is about to give up; if the other daemon ended first, this one would stay unnoticed
    return Started(pid, own=pid == process.pid)


def is_owned(home: Home) -> bool:
    """Whether a process that still runs holds this home or its runtime directory."""
    for directory in (home.root, home.runtime):
        try:
            os.kill(int((directory / DAEMON_LOCK).read_text()), 0)
        except PermissionError:
            return True
        except (OSError, ValueError):
            continue
        return True
    return False


def render_command(address: Address, idle_exit_s: int, bind: str | None) -> list[str]:
    """`serve`, listening where we will look for it, whatever its settings file says."""
    command = [sys.executable, "-m", "forkd.cli.main", "serve", "--idle-exit-secs", str(idle_exit_s)]
    if address.socket is None:
        return command  # the user has no unix socket: TCP is where we look
    command += ["--socket", str(address.socket)]
    if bind == NO_TCP:
        # A certificate without TCP is a mistake in settings, but not here.
        return [*command, "--bind", NO_TCP, "--tls-cert", NO_TCP, "--tls-key", NO_TCP]
    return command if bind is None else [*command, "--bind", bind]


def render_environment(environ: Mapping[str, str], home: Home) -> dict[str, str]:
    """Our environment, with absolute paths: the daemon runs in another directory."""
    kept = {name: value for name, value in environ.items() if name not in _NOT_FOR_IT}
    for name in _PATHS:
        if kept.get(name) and kept[name] != "none":
            kept[name] = str(Path(kept[name]).expanduser().absolute())
    return {**kept, "FORKD_HOME": str(home.root), "FORKD_RUNTIME_DIR": str(home.runtime)}


def stop_daemon(pid: int) -> None:
    """Sends SIGTERM and waits until it is gone. It may be gone already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        if not waiting.poll(STOP_DEADLINE_S * 1000):
            raise EngineFailed(
                f"The daemon (pid {pid}) did not end within {STOP_DEADLINE_S:.0f} s of SIGTERM",
                hint=f"End it with: kill -9 {pid}. Sandboxes keep running, and the next daemon takes them over",
            )
    except PermissionError:
        raise HostLacks(
            f"The daemon (pid {pid}) belongs to another user", hint="End it as that user, or as root"
        ) from None
    finally:
        os.close(handle)


def _spawn(command: list[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command,
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        os.close(output)


def _rotate(log: Path) -> int:
    """Where the new daemon's lines will begin. A log that has grown is renamed; one old log is kept."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_name(f"{LOG_NAME}.1"))
    return 0


def _is_ready(controller: Controller) -> bool:
    try:
        return controller.ready()
    except Unreachable:
        return False


def _died(pid: int, status: int, log: Path, begun_at: int) -> ForkdError:
    how = f"exited with {status}" if status >= 0 else f"was killed by signal {-status}"
    return HostLacks(
        f"The daemon that was started (pid {pid}) {how}",
        hint="Its last lines say why. To run it in the foreground: forkd serve",
        details=read_tail(log, begun_at),
    )


def _not_ready(process: subprocess.Popen[bytes], log: Path, begun_at: int) -> ForkdError:
    if process.poll() is None:
        said = f"The daemon that was started (pid {process.pid}) was not ready within {START_DEADLINE_S:.0f} s"
    else:
        said = f"The daemon that has this home did not answer within {START_DEADLINE_S:.0f} s"
    return Unreachable(said, hint=f"See {log}, and: forkd status", details=read_tail(log, begun_at))


def read_tail(log: Path, begun_at: int) -> str | None:
    """The last lines after this position."""
    try:
        with log.open("rb") as file:
            file.seek(max(begun_at, log.stat().st_size - (64 << 10)))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    return "\n".join(lines[-_LOG_LINES:]) or None
