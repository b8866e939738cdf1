"""`K=V` on the command line: environments, labels, metadata."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from forkd.errors import InvalidInput


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """The last one of a name counts."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{option} {text!r} is no K=V", hint=f"Write it as {option} NAME=value")
        pairs[name] = value
    return pairs


def parse_environment(texts: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A name alone takes this process's value along, and nothing when it has none."""
    given = []
    for text in texts:
        if "=" in text or not text:
            given.append(text)
        elif text in environ:
            given.append(f"{text}={environ[text]}")
    return parse_pairs(given, "-e")


def render_pairs(pairs: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(pairs.items()))
