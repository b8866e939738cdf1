"""Where forkd keeps things: one durable home, one runtime directory; and what doctor says about them."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks
from forkd.host.finding import Finding, Status
from forkd.wire.endpoint import find_runtime_directory

# In the root and in the runtime directory of a home that a daemon uses; holds its pid.
DAEMON_LOCK = "daemon.lock"
# sun_path holds 108 bytes; a runtime directory has to leave room for "<session>/<machine id>/agent.sock".
_MAX_RUNTIME_BYTES = 60
_GIB = 1 << 30
# An image with numpy takes 0.3 GiB, a snapshot of the default size up to 0.5.
_LITTLE_DISK_BYTES = 2 * _GIB


@dataclass(frozen=True)
class Home:
    root: Path
    runtime: Path

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def registry(self) -> Path:
        return self.root / "registry.db"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens.json"

    @property
    def config(self) -> Path:
        return self.root / "forkd.toml"

    @property
    def vms(self) -> Path:
        """VMs that outlive the process that started them."""
        return self.runtime / "vms"


def find_home() -> Home:
    """FORKD_HOME, else the user's data directory; sockets and pids go to the runtime directory."""
    return Home(root=_find_root(), runtime=_runtime_directory())


def _find_root() -> Path:
    """Raises RuntimeError for a user without a home directory."""
    explicit, data = os.environ.get("FORKD_HOME"), os.environ.get("XDG_DATA_HOME")
    if explicit:
        return Path(explicit).absolute()
    return (Path(data) if data else Path.home() / ".local/share").absolute() / "forkd"


def _runtime_directory() -> Path:
    path = find_runtime_directory()
    assert path is not None, "the server side runs on Linux"
    if len(os.fsencode(path)) > _MAX_RUNTIME_BYTES:
        raise HostLacks(
            f"The runtime directory {path} is too long for unix sockets",
            hint=f"Set FORKD_RUNTIME_DIR to a path of at most {_MAX_RUNTIME_BYTES} bytes",
        )
    return path


def ensure_private(path: Path) -> Path:
    """Make a directory only we can enter; refuse one that belongs to another user, or that others may write to."""
    hint = "Remove it or set FORKD_RUNTIME_DIR to another path"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except FileExistsError:
        raise HostLacks(f"{path} is not a directory of this user", hint=hint) from None
    except OSError as error:
        raise HostLacks(f"The directory {path} cannot be made: {error.strerror}", hint=hint) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise HostLacks(f"{path} is not a directory of this user", hint=hint)
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostLacks(f"Others may write to {path}", hint=f"chmod 700 {path}, or set FORKD_RUNTIME_DIR")
    return path


def probe_home(root: Path | None = None) -> Finding:
    try:
        root = root or _find_root()
    except RuntimeError:
        return Finding("home", Status.FAIL, "This user has no home directory", "Set FORKD_HOME")
    place = nearest_existing(root)
    if not _can_write(place):
        return Finding("home", Status.FAIL, f"{root} is not writable", "Set FORKD_HOME to a directory that is")
    free = shutil.disk_usage(place).free
    found = f"{root}, {free / _GIB:,.1f} GiB free"
    if free < _LITTLE_DISK_BYTES:
        return Finding("home", Status.WARN, found, "Free some space or set FORKD_HOME to another disk")
    return Finding("home", Status.OK, found)


def probe_runtime(path: Path | None = None) -> Finding:
    """Raises HostLacks."""
    path = path or _runtime_directory()
    place, remedy = nearest_existing(path), "Set FORKD_RUNTIME_DIR to a directory of this user"
    if not _can_write(place):
        return Finding("runtime directory", Status.FAIL, f"{path} is not writable", remedy)
    if place == path and place.lstat().st_uid != os.geteuid():
        return Finding("runtime directory", Status.FAIL, f"{path} belongs to another user", remedy)
    return Finding("runtime directory", Status.OK, str(path) if place == path else f"{path}, not made yet")


def nearest_existing(path: Path) -> Path:
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return candidate
    return Path("/")


def _can_write(place: Path) -> bool:
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
