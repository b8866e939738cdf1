"""Downloads that go on after a cut: where they are, what to ask for next, and when to stop trying. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypedDict
from urllib.parse import urljoin, urlsplit

from forkd.errors import Conflict, InvalidInput, Unreachable
from forkd.wire import api

FIRST_PIECE = 256 * 1024  # has the head of most packs: what is refused is refused before the rest is sent
PIECE = 4 << 20
MAX_REDIRECTS = 5
_MAX_FAILURES = 8  # in a row, without a byte between them
_MAX_FIRST_FAILURES = 3  # before the first byte: nobody may be there at all
_FIRST_WAIT_S = 0.2
_MAX_WAIT_S = 5.0
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)

# Told how many bytes have gone, and which part of all that is, once that is known.
OnProgress = Callable[[int, float | None], object]


class PackOptions(TypedDict, total=False):
    """How a pack is taken in. `tag`: another name for its head; `trust`: remember a key that is not known;
    `unsigned`: take it though nobody signed it; `force`: replace snapshots of the same tag; `keep_anyway`: though this
    daemon cannot run it."""

    tag: str | None
    trust: bool
    unsigned: bool
    force: bool
    keep_anyway: bool


class Pushed(TypedDict):
    """`imported` is what a daemon made of it, None of a plain web server."""

    url: str
    bytes: int
    imported: api.PackImported | None


class Patience:
    """How often to try again: some times in a row, as often as there is progress."""

    def __init__(self, *, begun: bool = False) -> None:
        self._begun = begun
        self._failures = 0

    def progress(self) -> None:
        self._begun = True
        self._failures = 0

    def next_wait(self) -> float | None:
        """Seconds, None to give up."""
        self._failures += 1
        if self._failures >= (_MAX_FAILURES if self._begun else _MAX_FIRST_FAILURES):
            return None
        return float(min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (self._failures - 1)))


class Position:
    """Where a download is. It is resumed one byte early: there is always something to get."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._skip = 0
        self._mark: str | None = None
        self.at = 0
        self.total: int | None = None

    def render_headers(self) -> dict[str, str]:
        if not self.at:
            return {}
        headers = {"Range": f"bytes={self.at - 1}-"}
        return headers if self._mark is None else headers | {"If-Range": self._mark}

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """An answer arrives. Raises when what is there is not what was begun with, or cannot be resumed."""
        mark = headers.get("etag")
        mark = None if mark is None or mark.startswith("W/") else mark
        if not self.at:
            self._mark = mark or headers.get("last-modified")
            self.total = _length(headers)
            return
        found = _RANGE.fullmatch(headers.get("content-range", "")) if status == 206 else None
        if found is None or int(found[1]) != self.at - 1:
            raise Conflict(
                f"The download of {self._name} cannot go on at byte {self.at}: it was changed, or its server cannot",
                hint="Begin again",
            )
        self.total = int(found[3]) if found[3] != "*" else None
        self._skip = 1

    def take(self, chunk: bytes) -> bytes:
        """What is new in it."""
        new, self._skip = chunk[self._skip :], max(0, self._skip - len(chunk))
        self.at += len(new)
        return new


def follow(url: str, location: str | None) -> str:
    """Where a redirect leads: to the same host, and never from https to http."""
    target = urljoin(url, location or "")
    here, there = urlsplit(url), urlsplit(target)
    same = (here.hostname, here.port) == (there.hostname, there.port)
    same = same or (here.hostname == there.hostname and here.port is None and there.port is None)
    if not location or not same or there.scheme not in (here.scheme, "https") or there.username is not None:
        raise Unreachable(
            f"{url} leads to another place: {ascii(target)[:200]}", hint="If that is what you want, name it instead"
        )
    return target


def find_origin(url: str) -> str:
    """Scheme, host and port: whose key a pack is signed with."""
    split = urlsplit(url)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2].lower()}"


def check_url(url: str) -> str:
    import httpx

    try:
        split = urlsplit(url)
        httpx.URL(url)
        usable = split.scheme in ("http", "https") and split.hostname and split.port != 0
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable or split.username is not None:
        raise InvalidInput(f"{url!a} is not the address of a pack", hint="Use http://host/path or https://host/path")
    return url


def is_plain_place(url: str) -> bool:
    """Whether it names a host and nothing on it: then it has to be a daemon."""
    split = urlsplit(url)
    return split.scheme == "unix" or (split.path in ("", "/") and not split.query)


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
