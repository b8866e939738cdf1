"""Names people choose, and the identity a fork is given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forkd.errors import InvalidInput
from forkd.model.names import (
    ENTROPY_BYTES,
    MAX_ENV_BYTES,
    MAX_ENV_VARIABLES,
    Identity,
    derive_hostname,
    new_identity,
    parse_image_name,
    parse_tag,
)

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


def test_two_identities_of_one_id_share_neither_machine_id_nor_entropy() -> None:
    one, other = new_identity("sb-1"), new_identity("sb-1")
    assert one.machine_id != other.machine_id
    assert one.entropy != other.entropy
    assert len(one.entropy) == ENTROPY_BYTES
    assert one.hostname == "sb-1"


def test_entropy_and_environment_are_not_shown() -> None:
    identity = new_identity("sb-1", env={"TOKEN": "very-secret"})
    assert "very-secret" not in repr(identity)
    assert repr(identity.entropy) not in repr(identity)


def test_the_environment_is_a_copy_that_cannot_be_changed() -> None:
    env = {"A": "1"}
    identity = new_identity("sb-1", env=env)
    env["A"] = "2"
    assert identity.env == {"A": "1"}
    with pytest.raises(TypeError):
        identity.env["A"] = "3"  # type: ignore[index]


@pytest.mark.parametrize(
    ("sandbox_id", "hostname"),
    [
        ("sb-1", "sb-1"),
        ("Sb_1.x", "sb-1-x"),
        ("a" * 100, "a" * 63),
        ("a" * 62 + "-b", "a" * 62),
        ("---", "sandbox"),
        ("", "sandbox"),
    ],
)
def test_the_hostname_is_the_nearest_legal_one(sandbox_id: str, hostname: str) -> None:
    assert derive_hostname(sandbox_id) == hostname


@pytest.mark.parametrize(
    "changed",
    [
        {"sandbox_id": ""},
        {"sandbox_id": "../x"},
        {"sandbox_id": "a\n"},
        {"sandbox_id": "a" * 129},
        {"hostname": ""},
        {"hostname": "-a"},
        {"hostname": "a-"},
        {"hostname": "A"},
        {"hostname": "a" * 64},
        {"machine_id": "0" * 32},
        {"machine_id": "f" * 31},
        {"machine_id": "F" * 32},
        {"entropy": b""},
        {"entropy": bytes(ENTROPY_BYTES - 1)},
        {"entropy": "x" * ENTROPY_BYTES},
        {"env": {"": "x"}},
        {"env": {"A=B": "x"}},
        {"env": {"1A": "x"}},
        {"env": {"A": "nul\0inside"}},
        {"env": {"A": 1}},
        {"env": {f"V{n}": "" for n in range(MAX_ENV_VARIABLES + 1)}},
        {"env": {"A": "x" * MAX_ENV_BYTES}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_illegal_part_is_refused(changed: dict[str, Any]) -> None:
    good = new_identity("sb-1")
    assert isinstance(good, Identity)
    with pytest.raises(InvalidInput):
        replace(good, **changed)
