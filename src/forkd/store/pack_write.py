"""Making a pack: any part of it from its place, so that a broken download goes on where it ended. Nothing is copied."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import zstandard

from forkd.errors import SnapshotDamaged
from forkd.host.files import FileSum
from forkd.store.pack_frames import END, FRAME, LEVEL, TAR_BLOCK, make_frame, padding, render_header
from forkd.store.pack_manifest import (
    BLOCK,
    Extent,
    PackedFile,
    PackManifest,
    find_extents,
    refused,
    render_pack_manifest,
)

MANIFEST_MEMBER = "forkd-pack.json"
SIGNATURE_MEMBER = "forkd-pack.sig"
WORKERS = min(4, os.cpu_count() or 1)
_AHEAD = 2 * WORKERS  # frames that are made, or being made, before they are asked for
_ZEROS = bytes(BLOCK)
_SCANNED = 64  # blocks that are read at once


def scan_file(path: Path, total: FileSum) -> PackedFile:
    """Which blocks are not zeros, by what is in them: where a file has holes depends on how it was copied."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return PackedFile(size, total.sha256, find_extents(size, _filled(fd, size)), total.chunks)
    finally:
        os.close(fd)


def _filled(fd: int, size: int) -> Iterator[Extent]:
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
        except OSError:  # holes to the end
            return
        end = os.lseek(fd, max(at, 0), os.SEEK_HOLE)
        if end <= at:
            end = at + BLOCK
        while at < end:
            data = os.pread(fd, min(_SCANNED * BLOCK, -(-(end - at) // BLOCK) * BLOCK), at)
            if not data:
                return
            for place in range(0, len(data), BLOCK):
                block = data[place : place + BLOCK]
                if block != _ZEROS[: len(block)]:
                    yield at + place, len(block)
            at += -(-len(data) // BLOCK) * BLOCK


class Packer:
    """The frames of one pack. `files` by the names of members; they are open until it is closed."""

    def __init__(self, manifest: PackManifest, signature: bytes, files: Mapping[str, Path], level: int = LEVEL) -> None:
        self._level = level
        text = render_pack_manifest(manifest)
        self._head = render_head(text, signature)
        self._stack = contextlib.ExitStack()
        # Pieces of the archive after the head: bytes, or a place in an open file.
        self._starts: list[int] = []
        self._pieces: list[tuple[int, bytes | tuple[int, int]]] = []
        self._length = 0
        try:
            for name, file in manifest.members():
                self._add_member(name, file, files[name])
        except BaseException:
            self.close()
            raise
        self._add(len(END), END)
        self.etag = hashlib.sha256(b"%d %r\0%s" % (level, zstandard.ZSTD_VERSION, self._head)).hexdigest()[:32]
        self._head_frames = -(-len(self._head) // FRAME)
        self.frames = self._head_frames + -(-self._length // FRAME)

    @property
    def raw_bytes(self) -> int:
        """Of what is in it."""
        return len(self._head) + self._length

    def close(self) -> None:
        self._stack.close()

    def make(self, number: int) -> bytes:
        """One frame; from any thread."""
        return make_frame(self._read(number), self._level)

    def stream(self, first: int = 0) -> Iterator[bytes]:
        """The frames from one on, in order, made by several threads a little ahead."""
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="pack") as pool:
            ahead: deque[Future[bytes]] = deque()
            try:
                for number in range(first, self.frames):
                    ahead.append(pool.submit(self.make, number))
                    if len(ahead) >= _AHEAD:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def _add_member(self, name: str, file: PackedFile, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._stack.callback(os.close, fd)
        self._add(TAR_BLOCK, render_header(name, file.stored))
        for start, length in file.extents:
            self._add(length, (fd, start))
        if more := padding(file.stored):
            self._add(more, bytes(more))

    def _add(self, length: int, what: bytes | tuple[int, int]) -> None:
        self._starts.append(self._length)
        self._pieces.append((length, what))
        self._length += length

    def _read(self, number: int) -> bytes:
        if number < self._head_frames:
            return self._head[number * FRAME : (number + 1) * FRAME]
        at = (number - self._head_frames) * FRAME
        left = min(FRAME, self._length - at)
        index = bisect.bisect_right(self._starts, at) - 1
        parts = []
        while left:
            length, what = self._pieces[index]
            skip = at - self._starts[index]
            size = min(length - skip, left)
            parts.append(what[skip : skip + size] if isinstance(what, bytes) else _pread(*what, skip, size))
            at, left, index = at + size, left - size, index + 1
        return b"".join(parts)


def render_head(manifest: bytes, signature: bytes) -> bytes:
    """The first two members: always as long as the manifest and three blocks."""
    assert len(signature) <= TAR_BLOCK
    return b"".join(
        [
            render_header(MANIFEST_MEMBER, len(manifest)),
            manifest + bytes(padding(len(manifest))),
            render_header(SIGNATURE_MEMBER, len(signature)),
            signature.ljust(TAR_BLOCK, b"\0"),
        ]
    )


def head_length(manifest_bytes: int) -> int:
    return manifest_bytes + padding(manifest_bytes) + 3 * TAR_BLOCK


def parse_head(head: bytes, manifest_bytes: int) -> tuple[bytes, bytes]:
    """Manifest and signature of a head that is complete."""
    manifest = head[TAR_BLOCK : TAR_BLOCK + manifest_bytes]
    signature = head[-TAR_BLOCK:].rstrip(b"\0")
    if head != render_head(manifest, signature):
        raise refused("it does not begin with a manifest and a signature")
    return manifest, signature


def _pread(fd: int, start: int, skip: int, size: int) -> bytes:
    data = os.pread(fd, size, start + skip)
    while len(data) < size:
        more = os.pread(fd, size - len(data), start + skip + len(data))
        if not more:
            raise SnapshotDamaged("A file became shorter while it was packed", hint="Look with: forkd snapshot ls")
        data += more
    return data
