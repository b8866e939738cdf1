"""Where forkd keeps things: one durable home, one runtime directory; and what doctor says about them."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks
from forkd.host.finding import Finding, Status
from forkd.wire.endpoint import find_home_directory, find_runtime_directory

# In the root and in the runtime directory of a home that a daemon uses; holds its pid.
DAEMON_LOCK = "daemon.lock"
# sun_path holds 108 bytes; a runtime directory has to leave room for "<session>/<machine id>/agent.sock".
_MAX_RUNTIME_BYTES = 60
_GIB = 1 << 30
# An image with numpy takes 0.3 GiB, a snapshot of the default size up to 0.5.
_LITTLE_DISK_BYTES = 2 * _GIB
_ONLY_OURS = "Take their right away with chmod go-w, or set FORKD_HOME to a directory that is only yours"


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
    def signing_key(self) -> Path:
        return self.root / "signing.key"

    @property
    def trust(self) -> Path:
        return self.root / "trust.json"

    @property
    def config(self) -> Path:
        return self.root / "forkd.toml"

    @property
    def vms(self) -> Path:
        """VMs that outlive the process that started them."""
        return self.runtime / "vms"


def find_home() -> Home:
    """FORKD_HOME, else the user's data directory; sockets and pids go to the runtime directory."""
    return Home(root=find_home_directory(), runtime=_runtime_directory())


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


def ensure_home(root: Path) -> Path:
    """Make the home, for us alone, or refuse one whose files others could replace: tokens and snapshots are in it."""
    hint = "Set FORKD_HOME to a directory that you can write to"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        exposure = find_exposure(root)
    except OSError as error:
        raise HostLacks(f"The home {root} cannot be made: {error.strerror}", hint=hint) from error
    if exposure is not None:
        raise HostLacks(exposure, hint=_ONLY_OURS)
    return root


def find_exposure(root: Path) -> str | None:
    """Who else could replace files in a directory that exists, in words; None when only we can. Raises OSError."""
    real = Path(os.path.realpath(root))
    info = real.stat()
    if info.st_uid != os.geteuid():
        return f"The home {root} belongs to another user"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"Others may write to the home {root}"
    for parent in real.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"Others may replace the home {root}: they may write to {parent}"
    return None


def probe_home(root: Path | None = None) -> Finding:
    try:
        root = root or find_home_directory()
    except RuntimeError:
        return Finding("home", Status.FAIL, "This user has no home directory", "Set FORKD_HOME")
    place = nearest_existing(root)
    if not _can_write(place):
        return Finding("home", Status.FAIL, f"{root} is not writable", "Set FORKD_HOME to a directory that is")
    if place == root and (exposure := find_exposure(root)):
        return Finding("home", Status.FAIL, exposure, _ONLY_OURS)
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
