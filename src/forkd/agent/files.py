"""Files: operations that fit into one answer (or raise OSError or Refused), and contents as streams both ways."""

from __future__ import annotations

import errno
import os
import stat

from forkd.agent.stream import Refused, Stream
from forkd.wire.agent import (
    DATA,
    GRANT_BYTES,
    MAX_PAYLOAD,
    REPLY,
    STDOUT,
    WINDOW_BYTES,
    encode,
    encode_json,
    encode_window,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List

    from forkd.agent.loop import Loop
    from forkd.agent.port import Port
    from forkd.agent.stream import Done, Request

MAX_PATH_BYTES = 4095
MAX_ENTRIES = 5000
_MAX_LISTING_BYTES = 1024 * 1024  # as JSON, where a byte of a name takes up to 6
_ENTRY_BYTES = 160
_NO_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def get_path(request: Request, key: str = "path") -> str:
    """An absolute path that is not too long; bytes that are not UTF-8 come as surrogate escapes."""
    path = request.get(key)
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise Refused("invalid", "A path must be absolute and without NUL")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise Refused("invalid", "A path has characters that cannot be in a file name") from None
    if size > MAX_PATH_BYTES:
        raise Refused("invalid", "A path is longer than %d bytes" % MAX_PATH_BYTES)
    return path


def find(request: Request) -> Dict[str, Any]:
    """stat, of the link itself when there is one."""
    path = get_path(request)
    answer = render_stat(os.lstat(path))
    if answer["type"] == "symlink":
        answer["target"] = os.readlink(path)
    return answer


def list_directory(request: Request) -> Dict[str, Any]:
    """The first entries in directory order; `truncated` when there are more."""
    limit = request.get("limit", MAX_ENTRIES)
    if not isinstance(limit, int) or not 0 < limit <= MAX_ENTRIES:
        raise Refused("invalid", "limit must be between 1 and %d" % MAX_ENTRIES)
    entries: List[Dict[str, Any]] = []
    truncated = False
    size = 0
    with os.scandir(get_path(request)) as found:
        for entry in found:
            target = _find_target(entry)
            size += _ENTRY_BYTES + 6 * (len(entry.name) + len(target))
            if len(entries) == limit or size > _MAX_LISTING_BYTES:
                truncated = True
                break
            try:
                entries.append(dict(render_stat(entry.stat(follow_symlinks=False)), name=entry.name))
            except FileNotFoundError:
                continue  # gone since the directory was read
            if target:
                entries[-1]["target"] = target
    return {"entries": entries, "truncated": truncated}


def _find_target(entry: os.DirEntry[str]) -> str:
    """Empty when it is not a link."""
    try:
        return os.readlink(entry.path) if entry.is_symlink() else ""
    except OSError:  # replaced since the directory was read
        return ""


def remove(request: Request) -> Dict[str, Any]:
    path = get_path(request)
    if path.strip("/") == "":
        raise Refused("invalid", "The root directory cannot be removed")
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif request.get("recursive") is True:
        _remove_tree(path)
    else:
        os.rmdir(path)
    return {}


def rename(request: Request) -> Dict[str, Any]:
    os.rename(get_path(request), get_path(request, "to"))
    return {}


def make_directory(request: Request) -> Dict[str, Any]:
    path = get_path(request)
    mode = get_mode(request, 0o755)
    if request.get("parents") is True:
        os.makedirs(path, mode, exist_ok=True)
    else:
        os.mkdir(path, mode)
    return {}


OPERATIONS: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "stat": find,
    "list": list_directory,
    "remove": remove,
    "rename": rename,
    "mkdir": make_directory,
}


def get_mode(request: Request, default: int) -> int:
    mode = request.get("mode", default)
    if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise Refused("invalid", "mode must be between 0 and 0o7777")
    return mode


def render_stat(found: os.stat_result) -> Dict[str, Any]:
    return {
        "type": _TYPES.get(stat.S_IFMT(found.st_mode), "unknown"),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime_ns": found.st_mtime_ns,
    }


def _remove_tree(path: str) -> None:
    """Bottom up, never following a link. By descriptor, so that a directory swapped for a link leads nowhere."""
    for _directory, names, files, fd in os.fwalk(path, topdown=False, onerror=_raise):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in names:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
            else:
                os.rmdir(name, dir_fd=fd)
    os.rmdir(path)


def _raise(error: OSError) -> None:
    raise error


class Reading(Stream):
    """Sends a part of a file, as fast as the host takes it."""

    def __init__(
        self,
        number: int,
        request: Request,
        loop: Loop,
        port: Port,
        on_done: Done,
        on_failed: Callable[[int, OSError], None],
    ) -> None:
        super().__init__(number)
        self._loop = loop
        self._port = port
        self._on_done = on_done
        self._on_failed = on_failed
        offset, length = request.get("offset", 0), request.get("length")
        if not isinstance(offset, int) or offset < 0:
            raise Refused("invalid", "offset must be a number, 0 or more")
        if length is not None and (not isinstance(length, int) or length < 0):
            raise Refused("invalid", "length must be a number, 0 or more")
        self._at = offset
        self._left: int | None = length
        self._fd, self._found = open_regular(get_path(request))

    def start(self) -> None:
        self._loop.busy.append(self._pump)

    def on_window(self, grant: int) -> None:
        self.credit += grant
        self._resume()

    def on_cancel(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._pause()

    def _resume(self) -> None:
        if self._fd >= 0 and self._pump not in self._loop.busy:
            self._loop.busy.append(self._pump)

    def _pause(self) -> None:
        if self._pump in self._loop.busy:
            self._loop.busy.remove(self._pump)

    def _pump(self) -> None:
        """One piece per turn: a large file must not keep others waiting."""
        if self._port.congested:
            self._pause()
            self._port.when_clear(self._resume)
            return
        want = MAX_PAYLOAD if self._left is None else min(self._left, MAX_PAYLOAD)
        if want and self.credit <= 0:
            self._pause()
            return
        try:
            data = os.pread(self._fd, min(want, self.credit), self._at) if want else b""
        except OSError as error:
            self.on_cancel()
            self._on_failed(self.number, error)
            return
        if not data:
            self.on_cancel()
            self._port.send(encode_json(REPLY, self.number, {"size": self._found.st_size}))
            self._on_done(self.number)
            return
        self.credit -= len(data)
        self._at += len(data)
        if self._left is not None:
            self._left -= len(data)
        self._port.send(encode(DATA, self.number, data, STDOUT))


class Writing(Stream):
    """Takes a file from the host. It gets its name when it is complete; appends go straight into the file."""

    def __init__(self, number: int, request: Request, port: Port, on_done: Done) -> None:
        super().__init__(number)
        self._port = port
        self._on_done = on_done
        self._allowed = WINDOW_BYTES
        self._owed = 0
        self._size = 0
        self._temporary: str | None = None
        self._mtime_ns = request.get("mtime_ns")
        if self._mtime_ns is not None and (type(self._mtime_ns) is not int or not 0 <= self._mtime_ns < 1 << 63):
            raise Refused("invalid", "mtime_ns must be between 0 and 2**63 - 1")
        # Through links: the file is replaced, not the link to it.
        self._path = os.path.realpath(get_path(request))
        if request.get("parents") is True:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if request.get("append") is True:
            mode = get_mode(request, 0o644)
            self._fd, _ = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        else:
            self._open_temporary(request)

    def on_data(self, payload: bytes) -> None:
        self._allowed -= len(payload)
        if self._allowed < 0:
            raise Refused("invalid", "More data was sent than granted")
        try:
            view = memoryview(payload)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._abort()
            raise
        self._size += len(payload)
        self._owed += len(payload)
        if self._owed >= GRANT_BYTES:
            self._allowed += self._owed
            self._port.send(encode_window(self.number, self._owed))
            self._owed = 0

    def on_end(self) -> None:
        try:
            if self._mtime_ns is not None:
                os.utime(self._fd, ns=(self._mtime_ns, self._mtime_ns))
            if self._temporary is not None:
                os.rename(self._temporary, self._path)
                self._temporary = None
        finally:
            self._abort()
        self._port.send(encode_json(REPLY, self.number, {"size": self._size}))

    def on_cancel(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            try:
                os.unlink(self._temporary)
            except OSError:
                pass
            self._temporary = None

    def _abort(self) -> None:
        self.on_cancel()
        self._on_done(self.number)

    def _open_temporary(self, request: Request) -> None:
        """Beside its final place, with the mode asked for, or else that of the file it replaces."""
        try:
            old: os.stat_result | None = os.stat(self._path)
        except FileNotFoundError:
            old = None
        if old is not None:
            _refuse_irregular(old)
        mode = get_mode(request, 0o644 if old is None else stat.S_IMODE(old.st_mode))
        temporary = "%s/.forkd-%s" % (os.path.dirname(self._path), os.urandom(8).hex())
        self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._temporary = temporary
        try:
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(self._fd, old.st_uid, old.st_gid)
            os.fchmod(self._fd, mode)
        except OSError:
            self.on_cancel()
            raise


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> tuple[int, os.stat_result]:
    """Opened without waiting: a FIFO without a writer would block the agent for ever."""
    try:
        fd = os.open(path, flags | _NO_WAIT, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise Refused("invalid", "Not a regular file", "ENXIO") from None
        raise
    found = os.fstat(fd)
    try:
        _refuse_irregular(found)
    except (OSError, Refused):
        os.close(fd)
        raise
    return fd, found


def _refuse_irregular(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise Refused("invalid", "Not a regular file")
