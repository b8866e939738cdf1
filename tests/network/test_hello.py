"""Names in the first message of TLS: real ones, and bytes of an enemy."""

import ssl
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.network.hello import MAX_BYTES, Hello, NotTls, parse_server_name


def make_hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = make_hello("Allowed.Test")


def in_records(hello: bytes, size: int) -> bytes:
    body = hello[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(hello[:3] + len(piece).to_bytes(2) + piece for piece in pieces)


def test_the_name_of_a_real_client_is_found() -> None:
    assert parse_server_name(HELLO) == "allowed.test"


@pytest.mark.parametrize("size", [1, 3, 50, 100])
def test_it_is_found_in_pieces_too(size: int) -> None:
    assert parse_server_name(in_records(HELLO, size)) == "allowed.test"


def test_until_it_is_whole_more_is_wanted() -> None:
    for end in range(len(HELLO)):
        assert parse_server_name(HELLO[:end]) is None


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
@pytest.mark.parametrize("piece", [1, 7, 64])
def test_it_is_found_as_soon_as_it_is_whole_in_any_pieces(size: int, piece: int) -> None:
    sent, said = in_records(HELLO, size), Hello()
    *before, last = [said.feed(sent[at : at + piece]) for at in range(0, len(sent), piece)]
    assert (before, last) == ([None] * len(before), "allowed.test") and said.data == sent


def count_lines(sent: bytes) -> int:
    """Lines of Python that run while it comes byte by byte."""
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    said, before = Hello(), sys.gettrace()
    sys.settrace(trace)
    try:
        for at in range(len(sent)):
            said.feed(sent[at : at + 1])
    finally:
        sys.settrace(before)
    return lines


def test_twice_as_much_in_small_pieces_is_twice_the_work() -> None:
    endless = in_records(b"\x16\x03\x01\0\0" + b"\x01\x00\x3f\xff" + bytes(MAX_BYTES), 1)
    assert count_lines(endless[:8000]) < 2.2 * count_lines(endless[:4000])


def test_without_a_name_it_is_refused() -> None:
    with pytest.raises(NotTls):
        parse_server_name(make_hello(None))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x02\x00", b"\x17\x03\x03\x00\x05hello", b"SSH-2.0-x"])
def test_what_is_not_tls_is_refused(data: bytes) -> None:
    with pytest.raises(NotTls):
        parse_server_name(data)


def test_one_that_never_ends_is_refused() -> None:
    endless = b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xff" + bytes(MAX_BYTES)
    with pytest.raises(NotTls):
        parse_server_name(endless[:MAX_BYTES])


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_have_a_name_or_none(data: bytes) -> None:
    try:
        parse_server_name(data)
    except NotTls:
        pass


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_a_damaged_one_has_a_legal_name_or_is_refused(at: int, value: int) -> None:
    try:
        name = parse_server_name(HELLO[:at] + bytes([value]) + HELLO[at + 1 :])
    except NotTls:
        return
    assert name is None or name == name.lower()
