"""Directories of the guest as tar streams: what a forked child of the agent does, since the agent itself may not wait.

It is a command without a program. To pack it writes the archive to its output; to unpack it reads one from its input,
and writes one JSON object about it. When it fails it writes what a FAIL frame carries to its standard error.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys

from forkd.agent.changes import parse_changes
from forkd.agent.files import get_path
from forkd.agent.stream import Refused
from forkd.wire.archive import PIECE_BYTES, Exceeded, Torn, Unpacker, pack
from forkd.wire.tar import PackFailed, TarError, render_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Set

    from forkd.agent.stream import Request

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_READ_BYTES = 256 * 1024
_MAX_ANSWER_BYTES = 128 * 1024  # half a window: it is written whether or not somebody reads it yet


def parse_task(request: Request) -> Callable[[], int]:
    """What the child does; it returns an exit code."""
    task = request["archive"]
    if task == "changes":
        work = parse_changes(request, lambda data: _write(_STDOUT, data))
        return lambda: _run(work)
    path = get_path(request)
    if task == "pack":
        return lambda: _run(lambda: _pack(path))
    if task == "unpack":
        keep = request.get("keep") is True
        return lambda: _run(lambda: _unpack(path, keep))
    raise Refused("invalid", "archive must be pack, unpack or changes")


def _run(work: Callable[[], None]) -> int:
    # A cancelled call ends in order, so that no temporary file stays.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    try:
        work()
    except Exception as error:
        refused = explain(error)
        answer = {"code": refused.code, "message": str(refused), "errno": refused.errno_name}
        _write(_STDERR, json.dumps({key: value for key, value in answer.items() if value}).encode())
        return 1
    except SystemExit:
        return 1
    return 0


def _pack(path: str) -> None:
    held, begun = bytearray(), False
    try:
        for piece in pack(path, _find_views() - {os.stat(path).st_dev}):
            held += piece
            if len(held) >= PIECE_BYTES:
                _write(_STDOUT, held)
                held.clear()
                begun = True
    except (OSError, Exceeded) as error:
        if not begun:
            raise
        # The answer is under way, and says it itself.
        refused = explain(error)
        held += render_failure(refused.code, str(refused))
    _write(_STDOUT, held)


def _find_views() -> Set[int]:
    """File systems that hold no files but views of the kernel, some without an end. One that is asked for is packed."""
    found = set()
    for path in ("/proc", "/sys", "/dev"):
        try:
            found.add(os.stat(path).st_dev)
        except OSError:
            continue
    return found


def _unpack(path: str, keep: bool) -> None:
    made = not os.path.lexists(path)
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    unpacker = Unpacker(path, follow=True, made=made, keep=keep)
    try:
        while True:
            data = os.read(_STDIN, _READ_BYTES)
            if not data:
                break
            unpacker.feed(data)
        unpacker.finish()
    except OSError as error:
        error.filename = os.path.join(path, error.filename or "")
        raise
    finally:
        unpacker.close()
    _write(_STDOUT, _render_answer(unpacker))


def _render_answer(unpacker: Unpacker) -> bytes:
    skipped = unpacker.skipped
    while True:
        answer = json.dumps({"files": unpacker.files, "bytes": unpacker.bytes, "skipped": skipped}).encode()
        if len(answer) <= _MAX_ANSWER_BYTES:
            return answer
        skipped = skipped[: len(skipped) // 2]


def explain(error: Exception) -> Refused:
    """With the path it is about."""
    from forkd.agent.server import refusal  # which imports us, by way of commands

    if isinstance(error, Torn) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError):
        refused = refusal(error)
        path = str(error.filename or "").encode("utf-8", "backslashreplace").decode()
        return Refused(refused.code, "%s: %s" % (path, error.strerror), refused.errno_name)
    if isinstance(error, Refused):
        return error
    if isinstance(error, PackFailed):
        return Refused(error.code, str(error))
    if isinstance(error, TarError):
        return Refused("invalid", "The archive has %s" % error)
    if isinstance(error, Exceeded):
        return Refused("invalid", str(error))
    return Refused("io", "Unexpected: %s" % error)


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    view.release()
