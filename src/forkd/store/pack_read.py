"""Taking a pack apart, as it arrives. It may come from an enemy.

Nothing is looked up by a name in it: from the signed manifest we know each byte that is not content, and compare.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forkd.host.chunks import CHUNK
from forkd.host.files import enough_disk
from forkd.store.pack_frames import (
    ANNOUNCED,
    END,
    FRAME,
    TAR_BLOCK,
    open_frame,
    padding,
    parse_announced,
    parse_size,
    render_header,
)
from forkd.store.pack_manifest import (
    MAX_MANIFEST_BYTES,
    PackedFile,
    PackManifest,
    parse_pack_manifest,
    refused,
)
from forkd.store.pack_write import MANIFEST_MEMBER, head_length, parse_head

_PAGE = 4096
_ZEROS = bytes(1 << 20)
_PAGE_ZEROS = bytes(_PAGE)

# Says whether a manifest with this signature may be read at all; raises when it may not.
Trusts = Callable[[bytes, bytes], None]
# Where each member goes; None: it is there already, and only checked.
Places = Mapping[str, Path | None]


class Unpacker:
    """`feed` it the pack in pieces of any size, then `finish`. Once it has raised, it is of no use any more."""

    def __init__(self, trusts: Trusts, accept: Callable[[PackManifest], Places]) -> None:
        self._trusts = trusts
        self._accept = accept
        self._input = bytearray()
        self._frame: tuple[int, int] | None = None
        self._head = bytearray()
        self._head_length: int | None = None
        self._manifest_bytes = 0
        self._body: _Body | None = None
        self.manifest: PackManifest | None = None
        self.offset = 0  # of the pack, as it came

    @property
    def raw_bytes(self) -> int:
        return len(self._head) + (self._body.taken if self._body else 0)

    @property
    def total_bytes(self) -> int | None:
        """What is in it; known once the manifest is."""
        return None if self._body is None else len(self._head) + self._body.length

    def feed(self, data: bytes) -> None:
        self._input += data
        self.offset += len(data)
        while True:
            wanted = ANNOUNCED if self._frame is None else self._frame[0]
            if self._body is not None and self._body.complete and self._input:
                raise refused("there is more after its end")
            if len(self._input) < wanted:
                return
            piece = bytes(self._input[:wanted])
            del self._input[:wanted]
            if self._frame is None:
                self._frame = parse_announced(piece)
                self._check_size(self._frame[1])
            else:
                raw = open_frame(piece, self._frame[1])
                self._frame = None
                self._take(raw)

    def finish(self) -> PackManifest:
        if self._body is None or not self._body.complete or self._input:
            raise refused("it ends too early")
        assert self.manifest is not None
        return self.manifest

    def close(self) -> None:
        if self._body is not None:
            self._body.close()

    def _check_size(self, size: int) -> None:
        """There is one way to cut a pack into frames: a million tiny ones are no pack."""
        if self._body is not None:
            left = self._body.length - self._body.taken
        elif self._head_length is not None:
            left = self._head_length - len(self._head)
        else:
            if size < TAR_BLOCK:
                raise refused("it does not begin with a manifest")
            return
        if size != min(FRAME, left):
            raise refused("a frame has not the size it has to have")

    def _take(self, raw: bytes) -> None:
        if self._body is not None:
            self._body.take(raw)
            return
        if self._head_length is None:
            self._measure_head(raw)
        self._head += raw
        if len(self._head) == self._head_length:
            self._open_body()

    def _measure_head(self, raw: bytes) -> None:
        self._manifest_bytes = parse_size(raw[:TAR_BLOCK])
        if not 0 < self._manifest_bytes <= MAX_MANIFEST_BYTES:
            raise refused("its manifest is too large")
        if raw[:TAR_BLOCK] != render_header(MANIFEST_MEMBER, self._manifest_bytes):
            raise refused("it does not begin with a manifest")
        self._head_length = head_length(self._manifest_bytes)
        self._check_size(len(raw))

    def _open_body(self) -> None:
        text, signature = parse_head(bytes(self._head), self._manifest_bytes)
        self._trusts(text, signature)
        manifest = parse_pack_manifest(text)
        self._body = _Body(manifest, self._accept(manifest))
        self.manifest = manifest


class _Body:
    """The members, one after the other, each where the manifest has it."""

    def __init__(self, manifest: PackManifest, places: Places) -> None:
        self._waiting = [(name, file, places[name]) for name, file in manifest.members()]
        self.length = len(END)
        for _, file, _ in self._waiting:
            self.length += TAR_BLOCK + file.stored + padding(file.stored)
        self._waiting.reverse()
        self.taken = 0
        self._exact = bytearray()  # what has to come next, byte for byte
        self._sink: _Sink | None = None
        self._next_member()

    @property
    def complete(self) -> bool:
        return self.taken == self.length

    def take(self, raw: bytes) -> None:
        self.taken += len(raw)
        left = memoryview(raw)
        while left:
            if self._exact:
                size = min(len(self._exact), len(left))
                if left[:size] != self._exact[:size]:
                    raise refused("a member is not what the manifest says")
                del self._exact[:size]
            else:
                assert self._sink is not None
                size = min(self._sink.left, len(left))
                self._sink.write(left[:size])
            left = left[size:]
            if not self._exact and self._sink is not None and not self._sink.left:
                self._finish_member()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def _next_member(self) -> None:
        if not self._waiting:
            self._exact += END
            return
        name, file, place = self._waiting.pop()
        self._exact += render_header(name, file.stored)
        self._sink = _Sink(name, file, place)

    def _finish_member(self) -> None:
        assert self._sink is not None
        self._sink.finish()
        self._exact += bytes(padding(self._sink.stored))
        self._sink = None
        self._next_member()


class _Sink:
    """One file: written where it is wanted, pages of zeros left out, and hashed with all its zeros."""

    def __init__(self, name: str, file: PackedFile, place: Path | None) -> None:
        self._name = name
        self._file = file
        self._place = place
        self.stored = self.left = file.stored
        self._extents = list(reversed(file.extents))
        self._at = 0
        self._end = 0  # of the extent that is being written
        self._sum = _ChunkSum(file, name) if file.chunks else _PlainSum(file, name)
        self._fd: int | None = None

    def write(self, data: memoryview) -> None:
        self.left -= len(data)
        while data:
            if self._at == self._end:
                self._begin_extent()
            piece = data[: self._end - self._at]
            self._sum.update(piece)
            self._store(piece)
            self._at += len(piece)
            data = data[len(piece) :]

    def finish(self) -> None:
        self._sum.add_zeros(self._file.size - self._at)
        self._sum.check()
        if self._place is not None:
            fd = self._open()
            with enough_disk(self._place.parent):
                os.ftruncate(fd, self._file.size)
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin_extent(self) -> None:
        start, length = self._extents.pop()
        self._sum.add_zeros(start - self._at)
        self._at, self._end = start, start + length

    def _open(self) -> int:
        assert self._place is not None
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._place, flags, 0o644)
        return self._fd

    def _store(self, data: memoryview) -> None:
        if self._place is None:
            return
        fd, at, begun = self._open(), self._at, None
        with enough_disk(self._place.parent):
            for place, end in _pages(at, len(data)):
                # A copy, as it is compared in one step; a view would be compared byte by byte.
                if bytes(data[place:end]) != _PAGE_ZEROS[: end - place]:
                    begun = place if begun is None else begun
                elif begun is not None:
                    _write_all(fd, data[begun:place], at + begun)
                    begun = None
            if begun is not None:
                _write_all(fd, data[begun:], at + begun)


def _pages(at: int, length: int) -> Iterator[tuple[int, int]]:
    """What of each page of the file is in a piece of it that begins at `at`."""
    place, end = 0, -at % _PAGE or _PAGE
    while place < length:
        yield place, min(end, length)
        place, end = end, end + _PAGE


class _PlainSum:
    """SHA-256 of the whole file."""

    def __init__(self, file: PackedFile, name: str) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def add_zeros(self, length: int) -> None:
        while length:
            size = min(length, len(_ZEROS))
            self._hash.update(_ZEROS[:size])
            length -= size

    def check(self) -> None:
        if self._hash.hexdigest() != self._file.sha256:
            raise _altered(self._name)


class _ChunkSum(_PlainSum):
    """Of each chunk; the hash of the file is that of all of them."""

    def __init__(self, file: PackedFile, name: str) -> None:
        super().__init__(file, name)
        self._room = CHUNK
        self._checked = 0
        self._used = False

    def update(self, data: memoryview) -> None:
        while data:
            piece = data[: self._room]
            super().update(piece)
            self._room -= len(piece)
            self._used = True
            data = data[len(piece) :]
            if not self._room:
                self._seal()

    def add_zeros(self, length: int) -> None:
        while length:
            if self._room == CHUNK and length >= CHUNK:
                self._compare(_hash_zeros())
                length -= CHUNK
                continue
            size = min(length, len(_ZEROS), self._room)
            self.update(memoryview(_ZEROS)[:size])
            length -= size

    def check(self) -> None:
        if self._used:
            self._seal()
        if self._checked != len(self._file.chunks):
            raise _altered(self._name)

    def _seal(self) -> None:
        self._compare(self._hash.hexdigest())
        self._hash, self._room, self._used = hashlib.sha256(), CHUNK, False

    def _compare(self, found: str) -> None:
        wanted, number = self._file.chunks, self._checked
        if number >= len(wanted) or wanted[number] != found:
            raise _altered(f"chunk {number} of {self._name}")
        self._checked += 1


@functools.cache
def _hash_zeros() -> str:
    return hashlib.sha256(bytes(CHUNK)).hexdigest()


def _altered(what: str) -> Exception:
    return refused(f"{what} was altered, its checksum does not match")


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
