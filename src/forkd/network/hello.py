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


def parse_server_name(data: bytes) -> str | None:
    """As `normal_name` returns it; None: more bytes are needed. Raises NotTls."""
    message = _handshake(data)
    if message is None:
        if len(data) >= MAX_BYTES:
            raise NotTls
        return None
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


def _handshake(data: bytes) -> bytes | None:
    """The first message, put together from records."""
    at, message = 0, b""
    while True:
        if data[at : at + 1] not in (b"", bytes([_HANDSHAKE])) or data[at + 1 : at + 2] not in (b"", b"\x03"):
            raise NotTls
        if len(data) < at + _RECORD_HEADER:
            return None
        size = int.from_bytes(data[at + 3 : at + 5])
        if not 0 < size <= MAX_BYTES:
            raise NotTls
        message += data[at + _RECORD_HEADER : at + _RECORD_HEADER + size]
        if message and message[0] != _CLIENT_HELLO:
            raise NotTls
        if len(message) >= _MESSAGE_HEADER:
            length = int.from_bytes(message[1:_MESSAGE_HEADER])
            if length > MAX_BYTES:
                raise NotTls
            if len(message) >= _MESSAGE_HEADER + length:
                return message[_MESSAGE_HEADER : _MESSAGE_HEADER + length]
        at += _RECORD_HEADER + size
        if at > len(data):
            return None


def _server_name(body: bytes) -> str:
    names = _Reader(_Reader(body).vector(2))
    if names.number(1) != _HOST_NAME:
        raise NotTls
    name = normal_name(names.vector(2).decode("ascii", errors="replace"))
    if name is None or names.more:
        raise NotTls
    return name
