"""The frames between host and guest agent. Pure: bytes in, frames out; both sides use this file.

A frame is a 20-byte header and up to 64 KiB of payload:

    magic u16 | kind u8 | flags u8 | stream u32 | length u32 | crc32(payload) u32 | crc32(header so far) u32

The header has its own checksum so that a damaged length is never waited for; the payload has one so that a frame
cut short by a vanished client, and completed by the next client's bytes, is never acted upon. Bulk frames (DATA)
leave it 0: what they carry only takes effect with a control frame of the same session.

Messages longer than a frame are split: all frames but the last carry MORE, back to back, nothing in between.

Standard library only, Python 3.8: the image builder copies this file into the guest.
"""

from __future__ import annotations

import json
from struct import Struct
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

    Frame = Tuple[int, int, int, bytes]  # kind, flags, stream, payload
    Frames = List[Frame]

PROTOCOL_VERSION = 1

MAX_PAYLOAD = 64 * 1024
MAX_MESSAGE = 2 * 1024 * 1024  # of a split message: code of 1 MiB, even when JSON doubles it
MAX_STREAMS = 64
WINDOW_BYTES = 256 * 1024  # what may be under way in one direction of one stream before the reader grants more
GRANT_BYTES = WINDOW_BYTES // 4  # readers grant in steps of at least this; the host refuses smaller ones

# Directories that the initramfs leaves open to the agent: the image, and what was written over it.
IMAGE_FD, UPPER_FD = 8, 9
# The interface that it sets up where there is one, and who is at the other end: see forkd.model.network.
INTERFACE, GATEWAY = "eth0", "192.0.0.1"

# Requests of the host
HELLO = 1
CALL = 2
EVAL = 3
EXEC = 4
BECOME = 5
# Final answers of the guest
REPLY = 6
FAIL = 7
# Inside an open stream
DATA = 8
END = 9
WINDOW = 10
CONTROL = 11
CANCEL = 12
STARTED = 13
CLOCK = 14
# Guest to host, stream 0: what was received was not the protocol
NOISE = 15
# Agent to interpreter only
FREEZE = 16

# Flags
MORE = 0x01
STDOUT = 0x10
STDERR = 0x20
TIMED_OUT = 0x40  # on REPLY: the deadline passed and the code was interrupted
FAILED = 0x80  # on REPLY of the interpreter to the agent: a step of the fork contract failed

_MAGIC = b"\xf0\x6b"
_MAGIC_NUMBER = 0xF06B
_FIELDS = Struct("!HBBIII")
_HEADER = Struct("!HBBIIII")
_U32 = Struct("!I")
_U64 = Struct("!Q")
HEADER_SIZE = _HEADER.size
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD

# Each rejected payload costs a checksum over up to 64 KiB, for as little as 20 bytes sent: an attack is cheap.
MAX_REJECTED = 16
# Each start of a header that is none costs a step of the parser, for as little as 2 bytes. The rest of a frame cut
# short has one or two of them by chance.
MAX_FALSE_HEADERS = 4096
_MAX_CHUNKS = 64


class WireError(Exception):
    """The bytes do not follow the protocol; `stream` is the stream they concern, 0 for all."""

    def __init__(self, message: str, stream: int = 0) -> None:
        super().__init__(message)
        self.stream = stream


def encode(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    head = _FIELDS.pack(_MAGIC_NUMBER, kind, flags, stream, len(payload), 0 if kind == DATA else crc32(payload))
    return head + _U32.pack(crc32(head)) + payload


def encode_message(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    """One message, in as many frames as it takes."""
    if len(payload) <= MAX_PAYLOAD:
        return encode(kind, stream, payload, flags)
    if len(payload) > MAX_MESSAGE:
        raise WireError("A message is larger than %d bytes" % MAX_MESSAGE, stream)
    frames = []
    last = (len(payload) - 1) // MAX_PAYLOAD * MAX_PAYLOAD
    for at in range(0, last, MAX_PAYLOAD):
        frames.append(encode(kind, stream, payload[at : at + MAX_PAYLOAD], flags | MORE))
    frames.append(encode(kind, stream, payload[last:], flags))
    return b"".join(frames)


def padding(size: int = MAX_FRAME) -> bytes:
    """Zeros that complete a frame of at most that size that the other side still waits for; it skips the rest."""
    return bytes(size)


def encode_json(kind: int, stream: int, value: Any, flags: int = 0) -> bytes:
    return encode_message(kind, stream, json.dumps(value).encode(), flags)


def decode_json(payload: bytes) -> Any:
    """A JSON object, or WireError, also when it is nested too deep, or has too long numbers or NaN."""
    try:
        value = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError("A control payload is not JSON") from error
    if not isinstance(value, dict):
        raise WireError("A control payload is not a JSON object")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(text + " is not a JSON number")


def encode_window(stream: int, grant: int) -> bytes:
    return encode(WINDOW, stream, _U32.pack(grant))


def decode_window(payload: bytes) -> int:
    if len(payload) != _U32.size:
        raise WireError("A window grant is not 4 bytes")
    grant: int = _U32.unpack(payload)[0]
    return grant


def encode_clock(stream: int, unix_ns: int) -> bytes:
    return encode(CLOCK, stream, _U64.pack(unix_ns))


def decode_clock(payload: bytes) -> int:
    if len(payload) != _U64.size:
        raise WireError("A clock answer is not 8 bytes")
    unix_ns: int = _U64.unpack(payload)[0]
    return unix_ns


def pack_eval(code: bytes, timeout_ms: int) -> bytes:
    """The agent reads the deadline and passes the whole on to the interpreter, untouched."""
    return _U32.pack(timeout_ms) + code


def unpack_timeout_ms(payload: bytes) -> int:
    if len(payload) < _U32.size:
        raise WireError("A request has no deadline")
    timeout_ms: int = _U32.unpack_from(payload)[0]
    return timeout_ms


def unpack_code(payload: bytes) -> bytes:
    return payload[_U32.size :]


# Not JSON: its parser would be the largest piece of cold code that a fork runs before it has its identity.
_BECOME_FIELDS = ("session", "sandbox_id", "hostname", "machine_id", "entropy", "nonce")
_BECOME_COUNT = 6
# Before the environment, of a fork that has a network. No variable is a text without "=".
_WITH_NETWORK = "network"


def pack_become(request: Dict[str, str], env: Dict[str, str], hooks_ms: int, network: bool = False) -> bytes:
    """The deadline for hooks; then texts separated by NUL: the fields in their order, the environment as NAME=value.

    Without a network it is what agents understand that know of none.
    """
    texts = [request[name] for name in _BECOME_FIELDS]
    if network:
        texts.append(_WITH_NETWORK)
    texts.extend(["%s=%s" % item for item in env.items()])
    return _U32.pack(hooks_ms) + "\0".join(texts).encode("utf-8", "surrogateescape")


def unpack_become(payload: bytes) -> Tuple[List[str], List[str], bool]:
    """The fields in their order; the environment, each NAME=value; whether it has a network.

    The deadline: `unpack_timeout_ms`.
    """
    body = payload[_U32.size :]
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.decode("utf-8", "surrogateescape")
    texts = text.split("\0", _BECOME_COUNT)
    if len(texts) < _BECOME_COUNT:
        raise WireError("A fork needs %d fields" % _BECOME_COUNT)
    if len(texts) == _BECOME_COUNT:
        return texts, [], False
    env = texts.pop().split("\0")
    network = env[0] == _WITH_NETWORK
    return texts, env[1:] if network else env, network


class Parser:
    """Bytes to frames. Holds less than one frame; after garbage it goes on at the next valid header.

    With a limit to the frames of one call it holds what was fed beyond it, and `stopped` says that there is more.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._chunks: List[bytes] = []
        self._held = 0
        self._need = HEADER_SIZE
        self._rejected = 0
        self._false_headers = 0
        self._skipped = 0

    def feed(self, data: bytes, limit: int | None = None) -> Frames:
        """The frames completed by `data`, `limit` at most. Raises WireError when the damage looks like an attack."""
        if self._chunks:
            # Joined once, when the frame is whole: the guest's port delivers at most 4 KiB per read.
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._need:
                if len(self._chunks) > _MAX_CHUNKS:
                    self._chunks = [b"".join(self._chunks)]
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        frames: Frames = []
        at = 0
        end = len(data)
        need = HEADER_SIZE
        self.stopped = False
        while end - at >= HEADER_SIZE:
            if len(frames) == limit:
                self.stopped = True
                break
            magic, kind, flags, stream, length, payload_crc, header_crc = _HEADER.unpack_from(data, at)
            body = at + HEADER_SIZE
            if magic != _MAGIC_NUMBER or length > MAX_PAYLOAD or crc32(data[at : body - 4]) != header_crc:
                at = self._resynchronise(data, at)
                continue
            stop = body + length
            if stop > end:
                need = HEADER_SIZE + length
                break
            payload = data[body:stop]
            if kind != DATA and crc32(payload) != payload_crc:
                # Only the header is skipped: the start of the next client's first frame may be in there.
                at = self._reject(data, at)
                continue
            frames.append((kind, flags, stream, payload))
            at = stop
        if at < end:
            self._chunks.append(data[at:] if at else data)
            self._held = end - at
            self._need = need
        return frames

    def reset(self) -> None:
        """Drop a half-received frame: its sender has left."""
        self._chunks.clear()
        self._held = 0
        self._rejected = 0
        self._false_headers = 0
        self.stopped = False

    def take_skipped(self) -> int:
        """Bytes skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def _resynchronise(self, data: bytes, at: int) -> int:
        found = data.find(_MAGIC, at + 1)
        if found < 0:
            found = len(data) - 1 if data[-1] == _MAGIC[0] else len(data)
        else:
            self._false_headers += 1
            if self._false_headers > MAX_FALSE_HEADERS:
                self.reset()
                raise WireError("Too many bytes that only look like frames")
        self._skipped += found - at
        return found

    def _reject(self, data: bytes, at: int) -> int:
        self._rejected += 1
        if self._rejected > MAX_REJECTED:
            self.reset()
            raise WireError("Too many frames with damaged payloads")
        return self._resynchronise(data, at)


class Joiner:
    """Frames of split messages to whole messages. Holds one message at most, since they are never interleaved."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self.active = False
        self._limit = limit
        self._chunks: List[bytes] = []
        self._size = 0
        self._kind = 0
        self._stream = 0

    @property
    def overflowed(self) -> bool:
        """The message under way is larger than allowed already."""
        return self._size > self._limit

    def join(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes | None:
        """The whole payload with the last frame, None before; WireError with the last frame of one too large."""
        if self.active and (kind != self._kind or stream != self._stream):
            # Its sender has left; this may be the next client's HELLO.
            self.reset()
        self.active, self._kind, self._stream = True, kind, stream
        self._size += len(payload)
        if self.overflowed:
            self._chunks.clear()
        else:
            self._chunks.append(payload)
        if flags & MORE:
            return None
        whole, too_large = b"".join(self._chunks), self.overflowed
        self.reset()
        if too_large:
            raise WireError("A message is larger than %d bytes" % self._limit, stream)
        return whole

    def reset(self) -> None:
        self.active = False
        self._chunks.clear()
        self._size = 0
