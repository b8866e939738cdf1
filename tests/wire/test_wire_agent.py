"""The codec: what was encoded comes out, however it was cut and whatever came in between."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.model.network import GATEWAY_ADDRESS, GUEST_INTERFACE
from forkd.wire import agent as wire
from forkd.wire.agent import (
    CALL,
    DATA,
    EVAL,
    HEADER_SIZE,
    HELLO,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    MORE,
    STDOUT,
    Joiner,
    Parser,
    WireError,
    encode,
    encode_message,
)

frames = st.tuples(st.integers(1, 16), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300))


def encode_frame(frame: tuple[int, int, int, bytes]) -> bytes:
    kind, flags, stream, payload = frame
    return encode(kind, stream, payload, flags)


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    points = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(points)]


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    parser = Parser()
    received = []
    for chunk in chunks_of(b"".join(map(encode_frame, sent)), cuts):
        received += parser.feed(chunk)
    assert received == sent
    assert parser.take_skipped() == 0


@given(frames, st.binary(max_size=500), frames, st.lists(st.integers(0, 2000), max_size=8))
def test_garbage_between_frames_is_skipped_and_counted_once(
    first: tuple[int, int, int, bytes],
    garbage: bytes,
    second: tuple[int, int, int, bytes],
    cuts: list[int],
) -> None:
    parser = Parser()
    received = []
    for chunk in chunks_of(encode_frame(first) + garbage + encode_frame(second), cuts):
        received += parser.feed(chunk)
    assert received == [first, second]
    assert parser.take_skipped() == len(garbage)
    assert parser.take_skipped() == 0


@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=5))
def test_no_bytes_at_all_make_the_parser_hold_more_than_a_frame(data: bytes, cuts: list[int]) -> None:
    parser = Parser()
    for chunk in chunks_of(data * 40, cuts):
        parser.feed(chunk)
        assert sum(map(len, parser._chunks)) < wire.MAX_FRAME


@given(st.integers(1, 7), st.lists(st.integers(0, 2000)))
def test_a_parser_asked_for_few_frames_at_a_time_gives_all_of_them(limit: int, cuts: list[int]) -> None:
    sent = [(DATA, STDOUT, number, bytes(number * 5)) for number in range(1, 20)]
    parser = Parser()
    received = []
    for chunk in chunks_of(b"".join(map(encode_frame, sent)), cuts):
        frames = parser.feed(chunk, limit)
        received += frames
        while parser.stopped:
            assert len(frames) == limit
            frames = parser.feed(b"", limit)
            received += frames
    assert received == sent


def test_bytes_that_only_look_like_frames_are_an_attack_and_a_few_are_not() -> None:
    parser = Parser()
    assert parser.feed(b"\xf0\x6b" * 100 + encode(HELLO, 1, b"{}")) == [(HELLO, 0, 1, b"{}")]
    with pytest.raises(WireError, match="only look like frames"):
        parser.feed(b"\xf0\x6b" * 100_000)
    assert parser.feed(encode(HELLO, 1, b"{}")) == [(HELLO, 0, 1, b"{}")], "it starts anew"


def test_a_header_that_announces_too_much_is_garbage() -> None:
    head = wire._FIELDS.pack(0xF06B, DATA, 0, 1, MAX_PAYLOAD + 1, 0)
    oversized = head + wire._U32.pack(wire.crc32(head))
    parser = Parser()
    assert parser.feed(oversized + encode(HELLO, 2, b"{}")) == [(HELLO, 0, 2, b"{}")]
    assert parser.take_skipped() == HEADER_SIZE


def test_a_truncated_frame_waits_for_its_rest() -> None:
    parser = Parser()
    frame = encode(CALL, 1, b"x" * 100)
    assert parser.feed(frame[:-1]) == []
    assert parser.feed(frame[-1:]) == [(CALL, 0, 1, b"x" * 100)]


@pytest.mark.parametrize("kind", [CALL, DATA])
def test_padding_ends_a_frame_whose_sender_is_gone_and_no_half_request_comes_out(kind: int) -> None:
    parser = Parser()
    parser.feed(encode(kind, 1, b"rm -rf /tmp/old" * 4000)[:70])
    received = parser.feed(wire.padding() + encode(HELLO, 2, b"{}"))
    assert received[-1] == (HELLO, 0, 2, b"{}")
    assert CALL not in [frame[0] for frame in received]


def test_a_frame_completed_by_the_next_clients_bytes_gives_up_the_next_clients_frame() -> None:
    parser = Parser()
    hello = encode(HELLO, 2, b"{}")
    cut = encode(CALL, 1, b"y" * 100)[: HEADER_SIZE + 100 - len(hello)]
    assert parser.feed(cut) == []
    assert parser.feed(hello) == [(HELLO, 0, 2, b"{}")]


def test_reset_forgets_a_half_received_frame() -> None:
    parser = Parser()
    parser.feed(encode(CALL, 1, b"y" * 100)[:50])
    parser.reset()
    assert parser.feed(encode(HELLO, 2)) == [(HELLO, 0, 2, b"")]


def test_frames_made_to_cost_checksums_are_an_attack() -> None:
    head = wire._FIELDS.pack(0xF06B, CALL, 0, 1, MAX_PAYLOAD, 123)
    bomb = head + wire._U32.pack(wire.crc32(head))
    with pytest.raises(WireError):
        Parser().feed(bomb * 8000)


@given(st.integers(0, 4 * MAX_PAYLOAD + 1))
def test_messages_of_any_size_are_split_and_joined(size: int) -> None:
    payload = os.urandom(size)
    joiner, whole = Joiner(), []
    received = Parser().feed(encode_message(EVAL, 7, payload))
    assert all(frame[1] & MORE for frame in received[:-1])
    for frame in received:
        joined = joiner.join(*frame)
        if joined is not None:
            whole.append(joined)
    assert whole == [payload]


def test_a_message_larger_than_allowed_is_refused_at_both_ends() -> None:
    with pytest.raises(WireError):
        encode_message(EVAL, 1, bytes(MAX_MESSAGE + 1))
    joiner = Joiner(limit=100)
    assert joiner.join(EVAL, MORE, 1, bytes(60)) is None
    assert joiner.join(EVAL, MORE, 1, bytes(60)) is None
    with pytest.raises(WireError) as caught:
        joiner.join(EVAL, 0, 1, bytes(60))
    assert caught.value.stream == 1
    assert joiner.join(EVAL, 0, 2, b"next") == b"next"


def test_a_split_message_whose_sender_is_gone_is_dropped() -> None:
    joiner = Joiner()
    assert joiner.join(EVAL, MORE, 1, b"half") is None
    assert joiner.join(HELLO, 0, 2, b"{}") == b"{}"


@pytest.mark.parametrize("payload", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b"1" * 10_000, b'{"a": NaN}'])
def test_control_payloads_that_are_no_json_object_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_json(payload)


@pytest.mark.parametrize("env", [{}, {"A": "x=\udcff\n", "B": ""}, {"C": "é"}])
def test_a_fork_is_told_its_fields_and_its_environment(env: dict[str, str]) -> None:
    names = ("session", "sandbox_id", "hostname", "machine_id", "entropy", "nonce")
    request = {name: str(at) for at, name in enumerate(names)}
    variables = [f"{name}={value}" for name, value in env.items()]
    for network in (False, True):
        payload = wire.pack_become(request, env, 1500, network)
        assert wire.unpack_timeout_ms(payload) == 1500
        assert wire.unpack_become(payload) == (list("012345"), variables, network)


def test_a_fork_without_network_is_told_what_older_agents_understand() -> None:
    names = ("session", "sandbox_id", "hostname", "machine_id", "entropy", "nonce")
    payload = wire.pack_become(dict.fromkeys(names, "x"), {"A": "1"}, 7)
    assert payload == b"\0\0\0\x07x\0x\0x\0x\0x\0x\0A=1"


def test_the_agent_has_the_same_network_as_the_host() -> None:
    assert (wire.INTERFACE, wire.GATEWAY) == (GUEST_INTERFACE, GATEWAY_ADDRESS)


@pytest.mark.parametrize("payload", [b"", b"\0" * 4, b"\0\0\0\1" + b"\0" * 4, b"\0\0\0\1\xff"])
def test_a_fork_that_is_told_too_little_refuses(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack_become(payload)


def test_windows_clocks_and_evals_are_packed_as_they_are_unpacked() -> None:
    parse = Parser().feed
    assert wire.decode_window(parse(wire.encode_window(1, 70_000))[0][3]) == 70_000
    assert wire.decode_clock(parse(wire.encode_clock(1, 1_700_000_000_123_456_789))[0][3]) == 1_700_000_000_123_456_789
    packed = wire.pack_eval("é".encode(), 1500)
    assert (wire.unpack_timeout_ms(packed), wire.unpack_code(packed)) == (1500, "é".encode())
    for decode in (wire.decode_window, wire.decode_clock, wire.unpack_timeout_ms):
        with pytest.raises(WireError):
            decode(b"abc")
