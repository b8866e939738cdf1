"""Server-sent events: the same however the bytes were cut, and never more than a limit."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.client.stream import SseError, SseEvent, SseParser

LINE = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
FIELD = st.one_of(
    st.tuples(st.sampled_from(["data", "event", "id", "retry", "", "other"]), LINE).map(lambda pair: ":".join(pair)),
    LINE,
    st.just(""),
)
STREAM = st.lists(st.tuples(FIELD, st.sampled_from(["\n", "\r\n", "\r"]))).map(
    lambda lines: "".join(text + end for text, end in lines).encode()
)


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@given(STREAM, st.lists(st.integers(0, 400)))
def test_any_cutting_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(places)]
    assert parse(*pieces) == parse(stream)
    assert parse(*(stream[at : at + 1] for at in range(len(stream)))) == parse(stream)


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "exit"]), LINE), max_size=5), st.sampled_from(["\n", "\r\n", "\r"])
)
def test_what_was_written_is_read(events: list[tuple[str, str]], end: str) -> None:
    text = "".join(f"event: {kind}{end}: comment{end}data: {data}{end}{end}" for kind, data in events)
    assert [(event.event, event.data) for event in parse(text.encode())] == events


def test_the_rules_of_fields() -> None:
    text = b"\xef\xbb\xbfdata: a\ndata:b\ndata\nid: 7\n\ndata: c\n\nevent: x\n\n: comment\n\ndata: last, cut off"
    assert parse(text) == [SseEvent("message", "a\nb\n", "7"), SseEvent("message", "c", "7")]


@pytest.mark.parametrize(
    "line", [b"data: " + b"x" * 200, b"data: " + b"x" * 60 + b"\ndata: " + b"x" * 60, b": " + b"x" * 200]
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_event_without_end_is_not_kept(line: bytes, step: int) -> None:
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(SseError, match="larger than 100"):
        for at in range(0, len(line), step):
            parser.feed(line[at : at + step])


def test_a_stream_of_many_events_is_not_one_large_event() -> None:
    parser = SseParser(max_event_bytes=100)
    assert sum(len(parser.feed(b"data: " + b"x" * 50 + b"\n\n")) for _ in range(10)) == 10
