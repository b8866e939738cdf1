"""Where client and daemon meet by default: a unix socket in the runtime directory, or TCP."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_BIND = "127.0.0.1:8889"
DEFAULT_URL = f"http://{DEFAULT_BIND}"
SOCKET_NAME = "forkd.sock"
_MEMORY = "/dev/shm"
_SUFFIX_DIGITS = 8


def find_loopback_port(address: str) -> int | None:
    """The port of `host:port` on this machine, as every sandbox has it; None for any other text."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not (port.isascii() and port.isdigit()):
        return None
    return int(port) if 1 <= int(port) <= 65535 else None


def find_home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """FORKD_HOME, else the user's data directory. Raises RuntimeError for a user without a home directory."""
    explicit = environ.get("FORKD_HOME")
    return Path(explicit).absolute() if explicit else _default_home(environ)


def _default_home(environ: Mapping[str, str]) -> Path:
    data = environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local/share").absolute() / "forkd"


def find_runtime_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """FORKD_RUNTIME_DIR, else the system's place for this user's sockets. None on systems without user ids.

    The daemon of another home than the user's default one has another directory.
    """
    if explicit := environ.get("FORKD_RUNTIME_DIR"):
        return Path(explicit).absolute()
    if not hasattr(os, "geteuid"):
        return None
    suffix = _suffix_of_home(environ)
    if os.geteuid() == 0:
        return Path(_in_memory("/run"), f"forkd{suffix}")
    if given := environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / f"forkd{suffix}"
    # Directly in /tmp or /dev/shm, whose sticky bit keeps others from replacing it.
    return Path(_in_memory("/tmp"), f"forkd-{os.geteuid()}{suffix}")


def _suffix_of_home(environ: Mapping[str, str]) -> str:
    """Empty for the default home; else one that follows from the home's path, however that is written."""
    explicit = environ.get("FORKD_HOME")
    if not explicit:
        return ""
    path = os.path.realpath(explicit)
    try:
        if path == os.path.realpath(_default_home(environ)):
            return ""
    except RuntimeError:
        pass  # no default
    return f"-{hashlib.sha256(os.fsencode(path)).hexdigest()[:_SUFFIX_DIGITS]}"


def _in_memory(place: str) -> str:
    """`place`, unless it is on a disk and /dev/shm is not: on a disk a VM's files cost more than forking it."""
    if os.path.ismount(place) or not os.path.ismount(_MEMORY):
        return place
    # A jail cannot use a mount that allows no devices or no programs.
    return place if os.statvfs(_MEMORY).f_flag & (os.ST_NODEV | os.ST_NOEXEC) else _MEMORY


def find_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The daemon's unix socket: FORKD_SOCKET, else the one in the runtime directory. None: it has none."""
    if explicit := environ.get("FORKD_SOCKET"):
        return None if explicit == "none" else Path(explicit).absolute()
    runtime = find_runtime_directory(environ)
    return None if runtime is None else runtime / SOCKET_NAME
