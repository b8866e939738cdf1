"""Names people choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forkd.errors import InvalidInput
from forkd.model.names import parse_image_name, parse_tag

ILLEGAL = {
    "empty": "",
    "parent directory": "..",
    "this directory": ".",
    "slash": "/",
    "inner slash": "a/b",
    "hidden": ".staging-1",
    "leading minus": "-rf",
    "65 characters": "a" * 65,
    "300 characters": "a" * 300,
    "letters beyond ASCII": "größe",
    "digits beyond ASCII": "٣",
    "NUL": "a\0b",
    "newline inside": "a\nb",
    "newline at the end": "a\n",
    "emoji": "🐍",
    "space": "a b",
    "terminal escape": "a\x1b[31m",
    "lone surrogate": "a\udcff",
}


@pytest.mark.parametrize("parse", [parse_tag, parse_image_name])
@pytest.mark.parametrize("text", ["a", "0", "_", "numpy-warm_2", "A-", "a" * 64])
def test_a_legal_name_stays_as_it_is(parse: Callable[[str], str], text: str) -> None:
    assert parse(text) == text


@pytest.mark.parametrize("text", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_name_is_refused_with_a_hint(text: str) -> None:
    for parse, what in ((parse_tag, "snapshot tag"), (parse_image_name, "image name")):
        with pytest.raises(InvalidInput) as caught:
            parse(text)
        assert what in caught.value.message
        assert caught.value.hint is not None and "1 to 64" in caught.value.hint


@pytest.mark.parametrize("text", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_the_refusal_can_be_printed_anywhere(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_tag(text)
    assert caught.value.message.isascii() and caught.value.message.isprintable()
    assert len(caught.value.message) < 160
