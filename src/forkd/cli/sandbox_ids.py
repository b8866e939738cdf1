"""Ids as people type them: whole, or any beginning that only one sandbox has."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from forkd.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from forkd.client.controller import Controller

_WHOLE = re.compile(r"sb-[0-9a-f]{10}", re.ASCII)
_PREFIX = "sb-"
_SHOWN = 5


def add_sandbox(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    about = "id, or the beginning of one"
    if nargs is None:
        parser.add_argument("sandbox", metavar="SANDBOX", help=about)
    else:
        parser.add_argument("sandbox", metavar="SANDBOX", nargs=nargs, help=about)


def resolve(controller: Controller, text: str) -> str:
    return resolve_all(controller, [text])[0]


def resolve_all(controller: Controller, texts: Sequence[str]) -> list[str]:
    """The ids meant, each once. Only abbreviations cost a question."""
    known: list[str] = []
    if not all(map(_WHOLE.fullmatch, texts)):
        known = [info["id"] for info in controller.list_sandboxes()]
    return list(dict.fromkeys(text if _WHOLE.fullmatch(text) else match(text, known) for text in texts))


def match(text: str, known: Iterable[str]) -> str:
    """The one id that begins so, with or without `sb-`."""
    wanted = _PREFIX + text.removeprefix(_PREFIX)
    found = [each for each in known if each.startswith(wanted)] if wanted != _PREFIX else []
    if not found:
        raise NotFound(f"There is no sandbox {ascii(text[:70])[1:-1]}", hint="List them with: forkd ls")
    if len(found) > 1:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise InvalidInput(
            f"{len(found)} sandboxes begin with {text}", hint=f"Say more of the id: {', '.join(found[:_SHOWN])}{more}"
        )
    return found[0]
