"""What users hand over to be written, as the bytes to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import IO, Any

from forkd.client.call import Content
from forkd.errors import InvalidInput

CHUNK_BYTES = 256 * 1024

Data = str | bytes | bytearray | memoryview | IO[Any] | Iterable[bytes] | Iterable[str]
AsyncData = Data | AsyncIterable[bytes] | AsyncIterable[str]


def content_of(data: Data) -> bytes | Iterator[bytes]:
    if isinstance(data, str):
        return _encoded(data)
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if (read := getattr(data, "read", None)) is not None:
        return _read(read)
    if isinstance(data, Iterable):
        return (_encoded(piece) for piece in data)
    raise InvalidInput(
        f"A {type(data).__name__} cannot be written to a file",
        hint="Give text, bytes, an open file or an iterator of bytes",
    )


def async_content_of(data: AsyncData) -> bytes | AsyncIterator[bytes]:
    """Files and iterators are read in a thread: they may block."""
    if isinstance(data, AsyncIterable):
        return _encoded_async(data)
    content = content_of(data)
    return content if isinstance(content, bytes) else _threaded(content)


def async_raw(content: Content) -> bytes | AsyncIterable[bytes]:
    return content if isinstance(content, bytes | AsyncIterable) else _threaded(iter(content))


async def _encoded_async(pieces: AsyncIterable[bytes] | AsyncIterable[str]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield _encoded(piece)


async def _threaded(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _read(read: Callable[[int], str | bytes]) -> Iterator[bytes]:
    while piece := read(CHUNK_BYTES):
        yield _encoded(piece)


def _encoded(piece: str | bytes | bytearray | memoryview) -> bytes:
    if isinstance(piece, str):
        # Surrogates are how Python reads what is no UTF-8: they become the bytes they came from.
        return piece.encode("utf-8", "surrogateescape")
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    raise InvalidInput(f"A {type(piece).__name__} cannot be written to a file", hint="Give text or bytes")


def decoded(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text", hint='Read it with format="bytes"') from None
