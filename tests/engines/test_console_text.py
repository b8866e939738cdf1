"""What a guest wrote to its console, made safe for a terminal."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from forkd.engines.base import printable


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x1b\r")))
def test_what_can_be_printed_stays_and_the_rest_is_a_question_mark(text: str) -> None:
    assert printable(text.encode()) == "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def test_escapes_and_carriage_returns_are_left_out_wherever_they_are() -> None:
    line = b"\x1b[1;31mred\x1b[0m and \xff\xc3\xa9\r\n"
    assert printable(line * 10_000) == "red and \ufffd\xe9\n" * 10_000
    assert printable(b"\x1b[2J" + b"x" * 100_000 + b"\0") == "x" * 100_000 + "?"
    assert printable(b"") == ""


def test_a_mebibyte_takes_few_steps() -> None:
    """Each step of Python counts: the daemon has other things to do."""
    steps = 0

    def count(_frame: object, _event: str, _argument: object) -> None:
        nonlocal steps
        steps += 1

    console = b"a line with \x01 in it\r\n" * 50_000
    sys.setprofile(count)
    try:
        printable(console)
    finally:
        sys.setprofile(None)
    assert steps < 20_000
