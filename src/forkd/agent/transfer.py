"""File contents as streams, in either direction."""

from __future__ import annotations

import errno
import os
import stat

from forkd.agent.files import get_mode, get_path
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
    from typing import Any, Callable, Dict

    from forkd.agent.loop import Loop
    from forkd.agent.port import Port

_NO_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Reading(Stream):
    """Sends a part of a file, as fast as the host takes it."""

    def __init__(
        self,
        number: int,
        request: Dict[str, Any],
        loop: Loop,
        port: Port,
        on_done: Callable[[int], None],
        on_failed: Callable[[int, OSError], None],
    ) -> None:
        super().__init__(number)
        self._loop = loop
        self._port = port
        self._on_done = on_done
        self._on_failed = on_failed
        offset, length = request.get("offset", 0), request.get("length")
        if not isinstance(offset, int) or offset < 0:
            raise Refused("invalid", "An offset is a number from 0")
        if length is not None and (not isinstance(length, int) or length < 0):
            raise Refused("invalid", "A length is a number from 0")
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
        """One piece a turn: a large file must not keep others waiting."""
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
    """Takes a file from the host. It appears under its name when all of it is there; appends go straight in."""

    def __init__(self, number: int, request: Dict[str, Any], port: Port, on_done: Callable[[int], None]) -> None:
        super().__init__(number)
        self._port = port
        self._on_done = on_done
        self._allowed = WINDOW_BYTES
        self._owed = 0
        self._size = 0
        self._temporary: str | None = None
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

    def _open_temporary(self, request: Dict[str, Any]) -> None:
        """Beside its place, with the rights it shall have: those asked for, else those of the file it replaces."""
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
    """Opened without waiting for anything: a FIFO nobody writes to would hold the agent for ever."""
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
