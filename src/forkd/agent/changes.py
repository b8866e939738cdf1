"""What the guest has written: the overlay's upper directory, and /tmp. A task of a forked child, like an archive.

The initramfs opens the upper directory and the image below it, which have no path after that, and leaves both open to
the agent. It writes JSON lines: what the clocks said, then an entry for each path, then the end.

The root and /tmp come first; their `ctime_ns` tells whether something was made or removed in them. `file` is what is
there now, null when it was removed; `base` what the image has there, null when it has nothing. A
removed directory is one entry. Of a directory that replaced one of the image, what it lacks is named as removed. The
overlay is mounted without redirects and without metacopy; should there be one, the answer is an error.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from forkd.agent.files import render_stat
from forkd.agent.fingerprint import fingerprint
from forkd.agent.stream import Refused
from forkd.wire.agent import IMAGE_FD, UPPER_FD
from forkd.wire.archive import MAX_DEPTH, PIECE_BYTES, Exceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Generator, Iterator, List, Set

    from forkd.agent.stream import Request

MAX_CHANGES = 200_000
_DISK = "/dev/vda"
_BLOCK_BYTES = 4096
_MAX_HASHED_BYTES = 4 << 30
_BREATH_BYTES = 64 << 20  # so much is hashed in silence
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Mounted over, and so not part of what can be seen.
_COVERED = ("/dev", "/proc", "/run", "/sys", "/tmp")
# Every fork has its own of the first two; the last is written at boot.
_IDENTITY = ("/etc/hostname", "/etc/machine-id", "/etc/resolv.conf")
_OPAQUE, _REDIRECT, _METACOPY = "trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy"


class Roots:
    """The image and the upper directory, open, and what tells the image from others: a digest of its first block."""

    def __init__(self, image: int, upper: int, digest: str) -> None:
        self.image = image
        self.upper = upper
        self.digest = digest


def find_roots() -> Roots | None:
    """Where the initramfs has opened them; None on a host."""
    try:
        for fd in (IMAGE_FD, UPPER_FD):
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                return None
            os.set_inheritable(fd, False)
        with open(_DISK, "rb", buffering=0) as disk:
            return Roots(IMAGE_FD, UPPER_FD, fingerprint(disk.read(_BLOCK_BYTES)))
    except OSError:
        return None


def parse_changes(request: Request, write: Callable[[bytearray], None]) -> Callable[[], None]:
    """The task. `facts` are the server's, not the host's."""
    since_ns, hashed, facts = request.get("since_ns", 0), request.get("sha256") is True, request["facts"]
    if type(since_ns) is not int or not 0 <= since_ns < 1 << 63:
        raise Refused("invalid", "since_ns must be between 0 and 2**63 - 1")
    roots = facts.pop("roots")
    if roots is None:
        raise Refused("unsupported", "This guest does not keep apart what it has written")
    return lambda: _send(roots, facts, Walk(since_ns, hashed), write)


def _send(roots: Roots, facts: Dict[str, Any], walk: Walk, write: Callable[[bytearray], None]) -> None:
    held = bytearray(_render(dict(facts, image=roots.digest)))
    for line in walk.lines(roots.image, roots.upper):
        held += line
        if len(held) >= PIECE_BYTES or line == b"\n":
            write(held)
            held.clear()
    held += _render({"end": True})
    write(held)


def _render(value: Dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class Walk:
    def __init__(self, since_ns: int = 0, hashed: bool = False) -> None:
        self._since_ns = since_ns
        self._hashed = hashed
        self._count = 0

    def lines(self, image: int, upper: int) -> Iterator[bytes]:
        # Opened anew: those that we were given share their place in the listing with everybody.
        with _Opened(".", image) as base, _Opened(".", upper) as top:
            yield from self._entry("/", ".", os.fstat(top), top, base)
            yield from self._list("", top, base, False, 0)
        yield from self._list_tmp()

    def _list_tmp(self) -> Iterator[bytes]:
        try:
            with _Opened("/tmp", None) as top:
                found = os.fstat(top)
                if found.st_dev != os.stat("/").st_dev:
                    yield from self._entry("/tmp", ".", found, top, top)
                    yield from self._list("/tmp", top, -1, False, 1)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _list(self, above: str, top: int, base: int, hidden: bool, depth: int) -> Iterator[bytes]:
        """`base` is the image's directory here, -1 when it has none; `hidden`: what is in there cannot be seen."""
        if depth > MAX_DEPTH:
            raise Exceeded("%s is more than %d directories deep" % (above, MAX_DEPTH))
        device = os.fstat(top).st_dev
        names = _names(top)
        for name in names:
            path = above + "/" + name
            if path in _COVERED or path in _IDENTITY:
                continue
            try:
                found = os.stat(name, dir_fd=top, follow_symlinks=False)
                yield from self._entry(path, name, found, top, base)
                if stat.S_ISDIR(found.st_mode) and found.st_dev == device:
                    yield from self._below(path, name, top, base, hidden, depth)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone, or replaced, since the directory was read
        if hidden and base >= 0:
            yield from self._missing(above, set(names), os.fstat(top), base)

    def _below(self, path: str, name: str, top: int, base: int, hidden: bool, depth: int) -> Iterator[bytes]:
        with _Opened(name, top) as inner:
            if _find_attribute(inner, _REDIRECT) is not None:
                raise Refused("io", "%s was renamed in a way that cannot be read" % path)
            hidden = hidden or _find_attribute(inner, _OPAQUE) == b"y"
            below = -1 if base < 0 else _open_directory(name, base)
            try:
                yield from self._list(path, inner, below, hidden, depth + 1)
            finally:
                if below >= 0:
                    os.close(below)

    def _missing(self, above: str, names: Set[str], of: os.stat_result, base: int) -> Iterator[bytes]:
        for name in _names(base):
            if name not in names and of.st_ctime_ns > self._since_ns:
                found = os.stat(name, dir_fd=base, follow_symlinks=False)
                yield self._line(above + "/" + name, of, None, _describe(found, name, base))

    def _entry(self, path: str, name: str, found: os.stat_result, top: int, base: int) -> Iterator[bytes]:
        if found.st_ctime_ns <= self._since_ns:
            return
        below = None if base < 0 else _find(name, base)
        image = None if below is None else _describe(below, name, base)
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            if image is not None:
                yield self._line(path, found, None, image)
            return
        file = _describe(found, name, top)
        if file["type"] == "file":
            if found.st_size and not found.st_blocks:
                _refuse_metacopy(path, name, top)
            if self._hashed:
                file["sha256"] = yield from _hash(name, top)
                if image is not None and image["type"] == "file" and image["size"] == file["size"]:
                    image["sha256"] = yield from _hash(name, base)
        yield self._line(path, found, file, image)

    def _line(
        self, path: str, found: os.stat_result, file: Dict[str, Any] | None, base: Dict[str, Any] | None
    ) -> bytes:
        self._count += 1
        if self._count > MAX_CHANGES:
            raise Exceeded("More than %d files were written" % MAX_CHANGES)
        entry = {"path": path, "ctime_ns": found.st_ctime_ns, "ino": found.st_ino, "file": file, "base": base}
        return _render(entry)


class _Opened:
    def __init__(self, name: str, above: int | None) -> None:
        self._name, self._above, self._fd = name, above, -1

    def __enter__(self) -> int:
        self._fd = os.open(self._name, _DIRECTORY, dir_fd=self._above)
        return self._fd

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)


def _open_directory(name: str, above: int) -> int:
    """-1 when there is none."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return -1
        raise


def _names(fd: int) -> List[str]:
    names = []
    with os.scandir(fd) as found:
        for entry in found:
            names.append(entry.name)
            if len(names) > MAX_CHANGES:
                raise Exceeded("A directory has more than %d files" % MAX_CHANGES)
    return sorted(names)


def _find(name: str, fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _describe(found: os.stat_result, name: str, fd: int) -> Dict[str, Any]:
    facts = render_stat(found)
    if facts["type"] == "dir":
        facts["size"] = 0
    if facts["type"] == "symlink":
        facts["target"] = os.readlink(name, dir_fd=fd)
    return facts


def _find_attribute(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, name)
    except OSError:
        return None


def _refuse_metacopy(path: str, name: str, above: int) -> None:
    fd = os.open(name, _READ, dir_fd=above)
    try:
        if _find_attribute(fd, _METACOPY) is not None:
            raise Refused("io", "%s was copied in a way that cannot be read" % path)
    finally:
        os.close(fd)


def _hash(name: str, above: int) -> Generator[bytes, None, str | None]:
    """Says something from time to time, and returns the digest; None of what is too large, or is no file any more."""
    import hashlib

    fd = os.open(name, _READ, dir_fd=above)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_HASHED_BYTES:
            return None
        digest, silent = hashlib.sha256(), 0
        while True:
            data = os.read(fd, 1 << 20)
            if not data:
                return digest.hexdigest()
            digest.update(data)
            silent += len(data)
            if silent >= _BREATH_BYTES:
                silent = 0
                yield b"\n"
    finally:
        os.close(fd)
