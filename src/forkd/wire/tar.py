"""Tar archives: entries to bytes and back. Pure; host, client and guest use this file.

Written is ustar, with a pax header where that cannot say it: long names, large sizes, fractions of a second. Read is
the same, and GNU's long names; sparse files and unknown types are refused. Nothing that an archive says is believed
before it is checked, and only one header is held at a time: `tarfile` reads headers of any size into memory. It also
takes an emulated guest longer to import than this takes to pack a hundred files.

Standard library only, Python 3.8: the image builder copies this file into the guest.
"""

from __future__ import annotations

from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, List, Tuple, Union

    Event = Union["Entry", bytes, None]

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_NAME_BYTES = 4095
_MAX_HEADER_BYTES = 64 * 1024  # of pax records or a long name
_MAX_HEADERS = 8  # before one entry
_MAX_TRAILING_BYTES = 1024 * 1024  # zeros after the end: tar fills up its last record
_MAX_OCTAL = 8**11
_MAX_SIZE = 1 << 62
_MAX_TIME_NS = 10**9 << 40
_NAME_FIELD = 100

_FIELDS = Struct("100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12x")
_CHECKSUM = slice(148, 156)
_BLANK_CHECKSUM = b" " * 8
_BLANK_SUM = sum(_BLANK_CHECKSUM)
_USTAR = b"ustar\x0000"
_ID = b"0000000\0"
_MAX_ID = 8**7

_FLAGS = {"file": b"0", "symlink": b"2", "char": b"3", "block": b"4", "dir": b"5", "fifo": b"6", "socket": b"6"}
_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "symlink",
    b"3": "char",
    b"4": "block",
    b"5": "dir",
    b"6": "fifo",
}
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_TARGET = b"x", b"g", b"L", b"K"
_HEADERS = (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_TARGET)
# Records of our own: what tar has no type for, and why an archive ends before its time.
_KIND_RECORD = b"FORKD.kind"
_FAILURE_RECORD = b"FORKD.failure"


class TarError(Exception):
    """The archive is damaged, hostile, or of a kind that is not taken. The message completes "The archive has"."""


class PackFailed(Exception):
    """Who packed it could not go on, and says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Entry:
    """Names are relative, with / between; bytes that are not UTF-8 are surrogate escapes."""

    __slots__ = ("gid", "kind", "mode", "mtime_ns", "name", "size", "target", "uid")

    def __init__(
        self,
        name: str,
        kind: str,
        mode: int,
        mtime_ns: int,
        size: int = 0,
        target: str = "",
        owner: Tuple[int, int] = (0, 0),
    ) -> None:
        self.name = name
        self.kind = kind
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.size = size
        self.target = target
        self.uid, self.gid = owner


def render_entry(entry: Entry) -> bytes:
    """What comes before the data of an entry; after the data comes `padding`."""
    name, target = _encode(entry.name), _encode(entry.target)
    if entry.kind == "dir":
        name += b"/"
    records: List[bytes] = []
    if len(name) > _NAME_FIELD:
        records.append(_render_record(b"path", name))
    if len(target) > _NAME_FIELD:
        records.append(_render_record(b"linkpath", target))
    if entry.size >= _MAX_OCTAL:
        records.append(_render_record(b"size", b"%d" % entry.size))
    if entry.kind == "socket":
        records.append(_render_record(_KIND_RECORD, b"socket"))
    seconds, fraction = divmod(entry.mtime_ns, 10**9)
    if fraction or not 0 <= seconds < _MAX_OCTAL:
        records.append(_render_record(b"mtime", _render_time(entry.mtime_ns)))
    owner = (entry.uid, entry.gid)
    for key, number in zip((b"uid", b"gid"), owner):
        if number >= _MAX_ID:
            records.append(_render_record(key, b"%d" % number))
    header = _render_header(name, entry.mode, entry.size, seconds, _FLAGS[entry.kind], target, owner)
    return _render_records(records) + header if records else header


def render_failure(code: str, message: str) -> bytes:
    """In place of the next entry and the end: the reader raises PackFailed."""
    return _render_records([_render_record(_FAILURE_RECORD, _encode(code + " " + message[:2000]))])


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _render_header(
    name: bytes,
    mode: int,
    size: int,
    seconds: int,
    flag: bytes,
    target: bytes = b"",
    owner: Tuple[int, int] = (0, 0),
) -> bytes:
    uid, gid = (b"%07o\0" % (number if number < _MAX_ID else 0) for number in owner)
    made = bytearray(
        _FIELDS.pack(
            name[:_NAME_FIELD],
            b"%07o\0" % mode,
            uid,
            gid,
            b"%011o\0" % (size if size < _MAX_OCTAL else 0),
            b"%011o\0" % min(max(seconds, 0), _MAX_OCTAL - 1),
            _BLANK_CHECKSUM,
            flag,
            target[:_NAME_FIELD],
            _USTAR,
            b"",
            b"",
            _ID,
            _ID,
            b"",
        )
    )
    made[_CHECKSUM] = b"%06o\0 " % sum(made)
    return bytes(made)


def _render_records(records: List[bytes]) -> bytes:
    body = b"".join(records)
    return _render_header(b"pax", 0o644, len(body), 0, _PAX) + body + padding(len(body))


def _render_record(key: bytes, value: bytes) -> bytes:
    """Its length comes first, and counts itself."""
    rest = b" %s=%s\n" % (key, value)
    size = len(rest)
    while size != len(rest) + len(str(size)):
        size = len(rest) + len(str(size))
    return b"%d%s" % (size, rest)


def _render_time(mtime_ns: int) -> bytes:
    sign = b"-" if mtime_ns < 0 else b""
    return b"%s%d.%09d" % (sign, abs(mtime_ns) // 10**9, abs(mtime_ns) % 10**9)


class Reader:
    """Bytes to entries, as they arrive."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""  # of a block that is not whole yet
        self._left = 0  # of the data that is being read
        self._padding = 0
        self._header = b""  # the type of a header whose data is being read
        self._gathered = bytearray()
        self._records: Dict[bytes, bytes] = {}  # for the next entry
        self._headers = 0  # since the last entry
        self._trailing = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """Each entry; after a file pieces of its data, then None."""
        at, end = 0, len(data)
        while at < end and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                if self._header:
                    self._gather(piece)
                else:
                    yield piece
                    if not self._left:
                        yield None
            elif self._padding:
                skipped = min(self._padding, end - at)
                self._padding -= skipped
                at += skipped
            else:
                block = data[at : at + BLOCK - len(self._rest)]
                at += len(block)
                entry = self._add_block(block)
                if entry is not None:
                    yield entry
                    if entry.kind == "file" and not entry.size:
                        yield None
        self._skip_trailing(data[at:])

    def _skip_trailing(self, data: bytes) -> None:
        self._trailing += len(data)
        if self._trailing > _MAX_TRAILING_BYTES or any(data):
            raise TarError("something behind its end")

    def _add_block(self, block: bytes) -> Entry | None:
        """A block, or a part of it."""
        if self._rest or len(block) < BLOCK:
            block = self._rest + block
            self._rest = b""
            if len(block) < BLOCK:
                self._rest = block
                return None
        return self._take_block(block)

    def _take_block(self, block: bytes) -> Entry | None:
        if not any(block):
            self.ended = True
            return None
        fields = _FIELDS.unpack(block)
        if _parse_number(fields[6]) != sum(block) - sum(fields[6]) + _BLANK_SUM:
            raise TarError("a damaged header")
        flag, size = fields[7], _parse_number(fields[4])
        if flag in _HEADERS:
            self._headers += 1
            if self._headers > _MAX_HEADERS:
                raise TarError("more than %d headers for one entry" % _MAX_HEADERS)
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise TarError("a header of %d bytes" % size)
            self._header = flag
            self._expect(size)
            return None
        entry = self._make_entry(fields, flag, size)
        self._records = {}
        self._headers = 0
        self._expect(entry.size)
        return entry

    def _expect(self, size: int) -> None:
        self._left = size
        self._padding = -size % BLOCK

    def _make_entry(self, fields: Tuple[bytes, ...], flag: bytes, size: int) -> Entry:
        records = self._records
        name = _decode(records.get(b"path") or _parse_name(fields))
        kind = _KINDS.get(flag)
        if kind is None:
            raise TarError("an entry of unknown type %r: %s" % (flag.decode("latin-1"), shown(name)))
        if kind == "file" and name.endswith("/"):
            kind = "dir"  # as tar did before there was a type for it
        if kind == "fifo" and records.get(_KIND_RECORD) == b"socket":
            kind = "socket"
        if b"size" in records:
            size = _parse_decimal(records[b"size"])
        if size >= _MAX_SIZE or (size and kind != "file"):
            raise TarError("an entry of a wrong size: %s" % shown(name))
        mtime = records.get(b"mtime")
        mtime_ns = _parse_number(fields[5]) * 10**9 if mtime is None else _parse_time(mtime)
        if abs(mtime_ns) >= _MAX_TIME_NS:
            raise TarError("an entry of a wrong time: %s" % shown(name))
        target = "" if kind != "symlink" else _decode(records.get(b"linkpath") or fields[8].partition(b"\0")[0])
        owner = (_parse_owner(records.get(b"uid"), fields[2]), _parse_owner(records.get(b"gid"), fields[3]))
        return Entry(name, kind, _parse_number(fields[1]) & 0o7777, mtime_ns, size, target, owner)

    def _gather(self, piece: bytes) -> None:
        self._gathered += piece
        if not self._left:
            self._take_header()

    def _take_header(self) -> None:
        data, flag = bytes(self._gathered), self._header
        self._gathered.clear()
        self._header = b""
        if flag == _GNU_NAME:
            self._records[b"path"] = data.rstrip(b"\0")
        elif flag == _GNU_TARGET:
            self._records[b"linkpath"] = data.rstrip(b"\0")
        else:
            records = _parse_records(data)
            if flag == _PAX:
                self._records.update(records)
            if _FAILURE_RECORD in records:
                code, _, message = _decode(records[_FAILURE_RECORD]).partition(" ")
                raise PackFailed(code, message)


def _parse_name(fields: Tuple[bytes, ...]) -> bytes:
    name, prefix = fields[0].partition(b"\0")[0], fields[14]
    if prefix[0] and fields[9].startswith(b"ustar\0"):
        return prefix.partition(b"\0")[0] + b"/" + name
    return name


def _parse_number(field: bytes) -> int:
    """Octal digits, or GNU's binary form of large numbers."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        number = int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        number = -1
    if number < 0:
        raise TarError("a damaged header")
    return number


def _parse_owner(record: bytes | None, field: bytes) -> int:
    number = _parse_number(field) if record is None else _parse_decimal(record)
    if number >= 1 << 32:
        raise TarError("a damaged header")
    return number


def _parse_decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise TarError("a damaged header")
    return int(digits)


def _parse_time(text: bytes) -> int:
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    mtime_ns = _parse_decimal(whole) * 10**9 + _parse_decimal((fraction + b"0" * 9)[:9])
    return -mtime_ns if text.startswith(b"-") else mtime_ns


def _parse_records(data: bytes) -> Dict[bytes, bytes]:
    found: Dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        digits = data[at : at + 20].partition(b" ")[0]
        stop = at + _parse_decimal(digits)
        key, equals, value = data[at + len(digits) + 1 : stop - 1].partition(b"=")
        if not equals or stop > len(data) or data[stop - 1 : stop] != b"\n":
            raise TarError("a damaged header")
        if key.startswith(b"GNU.sparse"):
            raise TarError("a sparse file; make it without --sparse")
        found[key] = value
        at = stop
    return found


def shown(name: str) -> str:
    return ascii(name)[:80]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
