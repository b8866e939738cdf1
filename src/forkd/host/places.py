"""Probes of the directories forkd writes to. They look at what is there and make nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forkd.errors import HostLacks
from forkd.host.finding import Finding, Status
from forkd.host.paths import Home, find_home

_GIB = 1 << 30
# An image with numpy takes 0.3 GiB, a snapshot of the default size up to 0.5.
_LITTLE_DISK_BYTES = 2 * _GIB


def probe_places() -> tuple[Finding, Finding]:
    """The home on disk and the runtime directory."""
    try:
        home = find_home()
    except HostLacks as error:
        return (
            Finding("home", Status.INFO, "not looked at"),
            Finding("runtime directory", Status.FAIL, error.message, error.hint),
        )
    except RuntimeError:  # no home directory for this user
        failed = Finding("home", Status.FAIL, "This user has no home directory", "Set FORKD_HOME")
        return failed, Finding("runtime directory", Status.INFO, "not looked at")
    return probe_home(home), probe_runtime(home)


def probe_home(home: Home) -> Finding:
    place = nearest_existing(home.root)
    if not _can_write(place):
        return Finding("home", Status.FAIL, f"{home.root} is not writable", "Set FORKD_HOME to a directory that is")
    free = shutil.disk_usage(place).free
    found = f"{home.root}, {free / _GIB:,.1f} GiB free"
    if free < _LITTLE_DISK_BYTES:
        return Finding("home", Status.WARN, found, "Free some space or set FORKD_HOME to another disk")
    return Finding("home", Status.OK, found)


def probe_runtime(home: Home) -> Finding:
    path, place = home.runtime, nearest_existing(home.runtime)
    remedy = "Set FORKD_RUNTIME_DIR to a directory of this user"
    if not _can_write(place):
        return Finding("runtime directory", Status.FAIL, f"{path} is not writable", remedy)
    if place == path and place.lstat().st_uid != os.geteuid():
        return Finding("runtime directory", Status.FAIL, f"{path} belongs to someone else", remedy)
    return Finding("runtime directory", Status.OK, str(path) if place == path else f"{path}, to be made")


def nearest_existing(path: Path) -> Path:
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return candidate
    return Path("/")


def _can_write(place: Path) -> bool:
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
