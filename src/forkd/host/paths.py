"""Where forkd keeps things: one durable home, one runtime directory."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks
from forkd.wire.endpoint import find_runtime_directory

# In the root and in the runtime directory of a home that a daemon has; its pid is inside.
DAEMON_LOCK = "daemon.lock"
# sun_path holds 108 bytes; a runtime directory has to leave room for "<session>/<machine id>/agent.sock".
_MAX_RUNTIME_BYTES = 60


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
        """Where VMs live that outlast the process that started them."""
        return self.runtime / "vms"


def find_home() -> Home:
    """FORKD_HOME, else the user's data directory; sockets and pids go to the runtime directory."""
    explicit = os.environ.get("FORKD_HOME")
    root = Path(explicit) if explicit else _data_directory() / "forkd"
    return Home(root=root.absolute(), runtime=_runtime_directory())


def _data_directory() -> Path:
    data = os.environ.get("XDG_DATA_HOME")
    return Path(data) if data else Path.home() / ".local/share"


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
    """Make a directory only we can enter; refuse one that someone else prepared for us, or may write to."""
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
