"""A JSON object with large texts in it, in pieces: rendered at once, 16 MiB of NUL bytes would take 400."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping

PIECE_BYTES = 64 * 1024
_STEP_BYTES = 16 * 1024  # of a text; as JSON a byte takes up to 6


def render_pieces(value: Mapping[str, object], end: bytes = b"") -> Iterator[bytes]:
    """Values that are bytes become texts, lossily: what is not UTF-8 is U+FFFD. A small object is one piece."""
    piece = bytearray()
    for part in _render_parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece + end)


def _render_parts(value: Mapping[str, object]) -> Iterator[bytes]:
    yield b"{"
    before = b""
    for key, each in value.items():
        yield before + json.dumps(key).encode() + b": "
        if isinstance(each, bytes):
            yield from _render_text(each)
        else:
            yield json.dumps(each, allow_nan=False).encode()
        before = b", "
    yield b"}"


def _render_text(data: bytes) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield b'"'
    for at in range(0, len(data), _STEP_BYTES):
        text = decoder.decode(data[at : at + _STEP_BYTES], final=at + _STEP_BYTES >= len(data))
        yield json.dumps(text)[1:-1].encode()
    yield b'"'
