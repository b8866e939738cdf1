"""The name in the first message of a TLS client. Pure; the bytes come from a guest."""

from __future__ import annotations

from forkd.model.network import normal_name

MAX_BYTES = 16384
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4


class NotTls(Exception):
    """Not the beginning of TLS, or without one legal name in it."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise NotTls
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        """With its length in so many bytes before it."""
        return self.take(self.number(size))

    @property
    def more(self) -> bool:
        return self._at < len(self._data)


class Hello:
    """The first message as it comes: a guest may send it byte by byte, and each is looked at once."""

    def __init__(self) -> None:
        self.data = bytearray()  # all that came
        self._at = 0  # what was looked at
        self._left = 0  # of the record that we are in
        self._message = bytearray()  # put together from records

    def feed(self, piece: bytes) -> str | None:
        """The name, as `normal_name` returns it; None: more bytes are needed. Raises NotTls."""
        self.data += piece
        length = self._find_end()
        if length is not None:
            return _find_name(bytes(self._message[_MESSAGE_HEADER:length]))
        if len(self.data) >= MAX_BYTES:
            raise NotTls
        return None

    def _find_end(self) -> int | None:
        """Of the message, once it is whole."""
        while True:
            if self._left:
                part = self.data[self._at : self._at + self._left]
                self._message += part
                self._at += len(part)
                self._left -= len(part)
                length = self._length()
                if length is not None and len(self._message) >= length:
                    return length
                if self._left:
                    return None
            header = bytes(self.data[self._at : self._at + _RECORD_HEADER])
            if header[:1] not in (b"", bytes([_HANDSHAKE])) or header[1:2] not in (b"", b"\x03"):
                raise NotTls
            if len(header) < _RECORD_HEADER:
                return None
            self._left = int.from_bytes(header[3:])
            if not 0 < self._left <= MAX_BYTES:
                raise NotTls
            self._at += _RECORD_HEADER

    def _length(self) -> int | None:
        """What the message says, with its header."""
        if self._message and self._message[0] != _CLIENT_HELLO:
            raise NotTls
        if len(self._message) < _MESSAGE_HEADER:
            return None
        length = int.from_bytes(self._message[1:_MESSAGE_HEADER])
        if length > MAX_BYTES:
            raise NotTls
        return _MESSAGE_HEADER + length


def parse_server_name(data: bytes) -> str | None:
    """As `feed`, of all that came."""
    return Hello().feed(data)


def _find_name(message: bytes) -> str:
    hello = _Reader(message)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session
    hello.vector(2)  # ciphers
    hello.vector(1)  # compressions
    extensions, names = _Reader(hello.vector(2)), []
    while extensions.more:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind == _SERVER_NAME:
            names.append(_server_name(body))
    if len(names) != 1:
        raise NotTls
    return names[0]


def _server_name(body: bytes) -> str:
    names = _Reader(_Reader(body).vector(2))
    if names.number(1) != _HOST_NAME:
        raise NotTls
    name = normal_name(names.vector(2).decode("ascii", errors="replace"))
    if name is None or names.more:
        raise NotTls
    return name
