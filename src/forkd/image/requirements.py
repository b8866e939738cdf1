"""What pip is asked for: requirements by name and version, from the command line and from files.

Only names: no addresses, paths or options. Where packages come from is pip's configuration on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from forkd.errors import InvalidInput

MAX_REQUIREMENTS = 500
_MAX_LINE = 4000
_MAX_FILE = 1 << 20

# Spaces and tabs only: after a new line pip would read an option.
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_EXTRAS = rf"(?:[ \t]*\[[ \t]*{_NAME}(?:[ \t]*,[ \t]*{_NAME}){{0,30}}[ \t]*\])?"
_CLAUSE = r"(?:===|~=|==|!=|<=|>=|<|>)[ \t]*[A-Za-z0-9.*+!_-]{1,100}"
_VERSIONS = rf"(?:[ \t]*{_CLAUSE}(?:[ \t]*,[ \t]*{_CLAUSE}){{0,30}})?"
_MARKER = r"(?:[ \t]*;[ \t]*[A-Za-z0-9_.()<>=!~'\" ,-]{1,1000}?)?"
_HASHES = r"(?:[ \t]+--hash=sha256:[0-9a-f]{64}){0,200}"
_REQUIREMENT = re.compile(rf"{_NAME}{_EXTRAS}{_VERSIONS}{_MARKER}{_HASHES}", re.ASCII)
_COMMENT = re.compile(r"(^|\s)#.*")


def check_requirements(requirements: Iterable[str]) -> tuple[str, ...]:
    """In the order given, without repetitions."""
    checked = tuple(dict.fromkeys(_check(text.strip(), "--pip") for text in requirements))
    if len(checked) > MAX_REQUIREMENTS:
        raise InvalidInput(f"{len(checked)} pip requirements are more than the {MAX_REQUIREMENTS} an image may have")
    return checked


def parse_requirements(text: str, where: str) -> tuple[str, ...]:
    """The requirements of a file such as requirements.txt; `where` names it in errors."""
    if len(text) > _MAX_FILE:
        raise InvalidInput(f"{where} is larger than {_MAX_FILE >> 20} MiB")
    return tuple(_check(line, f"{where}, line {number}") for number, line in _logical_lines(text))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """With the number of the first line of each; a backslash at the end joins lines, # begins a comment."""
    begun, joined = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begun = begun if joined else number
        joined += _COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if joined.strip():
            yield begun, joined.strip()
        joined = ""


def _check(text: str, where: str) -> str:
    if len(text) <= _MAX_LINE and _REQUIREMENT.fullmatch(text) is not None:
        return text
    shown = ascii(text if len(text) <= 70 else text[:67] + "...")
    if text.startswith("-"):
        raise InvalidInput(
            f"{where}: options are not read here, got {shown}",
            hint="Name packages only; which index they come from is pip's configuration (pip config list)",
        )
    raise InvalidInput(
        f"{where}: expected a package such as numpy==1.26.4, got {shown}",
        hint="Addresses and paths are not taken; copy local code with --copy",
    )
