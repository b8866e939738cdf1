"""What a guest has written over its image, as the guest tells it. Nothing of it is believed before it is checked."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from forkd.errors import InvalidInput, ProtocolError, Unsupported
from forkd.guest.archive import find_failure
from forkd.guest.exchange import Caller, get_int, get_text, parse_object
from forkd.guest.files import MAX_PATH_BYTES, TRANSFER_S, parse_file
from forkd.guest.process import Process

# More than an honest agent sends.
MAX_CHANGES = 200_000
MAX_CHANGES_BYTES = 256 * 1024 * 1024
_MAX_LINE_BYTES = 128 * 1024  # a path and two targets of links, of which JSON needs 6 bytes for one
_MAX_ERROR_BYTES = 256 * 1024
_MAX_STEPS = 100
_GLANCES = 3
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_OLD_AGENT = ("archive must be pack or unpack", "A command needs a list of arguments")
_HINT = "Make the snapshot again"


@dataclass(frozen=True)
class Facts:
    """A file as it is, or as the image has it. `sha256` only where it was asked for."""

    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Change:
    """`file` is None where something of the image was removed; `base` where the image has nothing."""

    path: str
    ctime_ns: int
    ino: int
    file: Facts | None
    base: Facts | None


@dataclass(frozen=True)
class Glance:
    """The guest's clock, and the host's before and after that."""

    now_ns: int = 0
    host_before_ns: int = 0
    host_after_ns: int = 0


@dataclass(frozen=True)
class Clocks:
    """Of the guest.

    `began_ns`: the guest's clock when it was forked, as it was in its parent; `born_ns`: after it was set, at the end
    of the contract. Both are 0 in a guest that is no fork. `steps`: each time it was set since, what it was set to and
    by how much it moved.
    """

    image: str  # tells it from other images
    began_ns: int
    born_ns: int
    steps: tuple[tuple[int, int], ...]
    glance: Glance = Glance()


class ChangeCalls(Caller):
    async def changes(self, *, since_ns: int = 0, sha256: bool = False) -> AsyncGenerator[Clocks | Change | None, None]:
        """The clocks; then each path whose ctime is later than `since_ns`; None when it is busy with a large file."""
        # An agent from before asks for a path first.
        request = {"archive": "changes", "path": "/", "since_ns": since_ns, "sha256": sha256, "stdin": False}
        reader, errors = ChangeReader(), bytearray()
        async with Process(self.channel, request, TRANSFER_S) as process:
            await _started(process)
            glance = await self._look_at_clock()
            async for kind, data in process:
                if kind == "stdout":
                    for line in reader.feed(data):
                        taken = reader.take(line)
                        yield replace(taken, glance=glance) if isinstance(taken, Clocks) else taken
                elif len(errors) < _MAX_ERROR_BYTES:
                    errors += data
            result = await process.wait()
        if not result.ok:
            raise find_failure(result, bytes(errors), "it listed what was written")
        reader.finish()

    async def _look_at_clock(self) -> Glance:
        """The quickest of a few: the less time it took, the better both clocks are known in one moment."""
        seen = []
        for _ in range(_GLANCES):
            before_ns = time.time_ns()
            answer = await self.call({"op": "ping"}, "answer a ping")
            seen.append(Glance(get_int(answer, "realtime_ns"), before_ns, time.time_ns()))
        return min(seen, key=lambda each: each.host_after_ns - each.host_before_ns)


async def _started(process: Process) -> None:
    try:
        await process.started()
    except (InvalidInput, Unsupported) as error:
        if isinstance(error, InvalidInput) and not any(each in error.message for each in _OLD_AGENT):
            raise
        message = "The sandbox comes from a snapshot whose agent cannot tell what was written"
        if isinstance(error, Unsupported):
            message = "The sandbox's engine has no disk of its own, so it cannot tell what was written"
        raise Unsupported(message, hint=_HINT if isinstance(error, InvalidInput) else "Use the engine qemu") from error


class ChangeReader:
    """Bytes to lines to changes, counted and checked."""

    def __init__(self) -> None:
        self._rest = b""
        self._bytes = 0
        self._changes = 0
        self._begun = self._ended = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        self._bytes += len(data)
        if self._bytes > MAX_CHANGES_BYTES:
            raise ProtocolError(f"The guest listed more than {MAX_CHANGES_BYTES} bytes of changes")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > _MAX_LINE_BYTES:
            raise ProtocolError("The guest described a change in too many words")
        return lines

    def take(self, line: bytes) -> Clocks | Change | None:
        """None for the end, and for a sign of life."""
        if not line:
            return None
        if self._ended:
            raise ProtocolError("The guest listed changes behind their end")
        answer = parse_object(line)
        if not self._begun:
            self._begun = True
            return parse_clocks(answer)
        if answer == {"end": True}:
            self._ended = True
            return None
        self._changes += 1
        if self._changes > MAX_CHANGES:
            raise ProtocolError(f"The guest listed more than {MAX_CHANGES} changes")
        return parse_change(answer)

    def finish(self) -> None:
        if not self._ended or self._rest:
            raise ProtocolError("The guest did not list its changes to their end")


def parse_clocks(answer: dict[str, Any]) -> Clocks:
    steps = answer.get("steps")
    if not isinstance(steps, list) or len(steps) > _MAX_STEPS:
        raise ProtocolError("The guest did not say how its clock was set")
    for step in steps:
        if not isinstance(step, list) or len(step) != 2 or not all(map(_is_number, step)):
            raise ProtocolError("The guest did not say how its clock was set")
    image = get_text(answer, "image", 64)
    if not _SHA256.fullmatch(image):
        raise ProtocolError("The guest did not say which image it has")
    return Clocks(
        image=image,
        began_ns=get_int(answer, "began_ns"),
        born_ns=get_int(answer, "born_ns"),
        steps=tuple((at, by) for at, by in steps),
    )


def parse_change(answer: dict[str, Any]) -> Change:
    path = get_text(answer, "path", MAX_PATH_BYTES)
    _check_path(path)
    file, base = (_parse_facts(answer.get(key)) for key in ("file", "base"))
    if file is None and base is None:
        raise ProtocolError("The guest listed a change of nothing")
    return Change(path, get_int(answer, "ctime_ns"), get_int(answer, "ino"), file, base)


def _check_path(path: str) -> None:
    """Absolute, a step down at a time, and of bytes that a file name can have."""
    steps = path.split("/")
    if path == "/":
        return
    if steps[0] or len(steps) < 2 or any(step in ("", ".", "..") for step in steps[1:]) or "\0" in path:
        raise ProtocolError(f"The guest listed a path that is not valid: {ascii(path)[:80]}")
    try:
        if len(path.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
            raise ProtocolError("The guest listed a path that is too long")
    except UnicodeEncodeError as error:
        raise ProtocolError(f"The guest listed a path that is not valid: {ascii(path)[:80]}") from error


def _parse_facts(value: object) -> Facts | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ProtocolError("The guest described a file in a way that cannot be read")
    file = parse_file(value, "")
    digest = value.get("sha256")
    if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise ProtocolError("The guest sent a digest that is none")
    if (file.type == "symlink") != (file.target is not None) or len(file.target or "") > MAX_PATH_BYTES:
        raise ProtocolError("The guest described a link that leads nowhere")
    return Facts(file.type, file.size, file.mode, file.uid, file.gid, file.mtime_ns, file.target, digest)


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63
