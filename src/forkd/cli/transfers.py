"""What both directions of `forkd cp` share: the tally, and which names may become files."""

from __future__ import annotations

import errno
import os
import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forkd.errors import ForkdError, HostLacks, NoCapacity, NotFound, ProtocolError

if TYPE_CHECKING:
    from forkd.client.controller import Controller

CHUNK = 256 * 1024
# A directory below so many others is not one that somebody made for a purpose.
MAX_DEPTH = 100


@dataclass(frozen=True)
class Skipped:
    path: str
    why: str


@dataclass
class Tally:
    files: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, path: str, why: str) -> None:
        self.skipped.append(Skipped(path, why))

    def render(self) -> dict[str, Any]:
        skipped = [{"path": each.path, "why": each.why} for each in self.skipped]
        return {"files": self.files, "bytes": self.bytes, "skipped": skipped}


def check_name(name: str) -> str:
    """A name the guest gave, fit to be one here: a single step down, never up, never elsewhere."""
    legal = name not in ("", ".", "..") and not any(each in name for each in "/\0")
    if legal and os.sep == "\\":
        legal = not any(each in name for each in "\\:")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        legal = False
    if not legal:
        raise ProtocolError(f"The guest names a file {ascii(name)[:80]}, which is no name of a file")
    return name


def is_directory(controller: Controller, sandbox_id: str, path: str) -> bool:
    """Of a path in the guest, which may be a link to one."""
    try:
        info = controller.stat_file(sandbox_id, path)
    except NotFound as error:
        if error.url is None or sandbox_id in error.message:
            raise  # it is the sandbox that is not there
        raise NotFound(
            f"There is no {path} in {sandbox_id}", hint=f"Look with: forkd exec {sandbox_id} -- ls"
        ) from error
    if info["type"] != "symlink":
        return info["type"] == "dir"
    try:
        controller.list_files(sandbox_id, path)
    except NotFound:
        raise
    except ForkdError as error:
        if error.code != "not_dir":
            raise
        return False
    return True


def last_name(path: str) -> str:
    """The name a copy gets where only its directory is said; empty for a root, or what ends in `/.`."""
    name = posixpath.basename(path.rstrip("/"))
    return "" if name == "." else name


def failed(verb: str, path: object, error: OSError) -> ForkdError:
    """What this machine's file system refused."""
    said = f"{path} cannot be {verb}: {error.strerror}"
    if error.errno == errno.ENOENT:
        return NotFound(said, hint="Check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoCapacity(said, hint="Make room, or choose another disk")
    return HostLacks(said, hint="Check what is there, and whether it is yours")
