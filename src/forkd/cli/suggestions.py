"""Did you mean …? The known word that is most like a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, NotFound

if TYPE_CHECKING:
    from forkd.client import Controller

_ALIKE = 0.6
_LONGEST = 80  # comparing takes the square of it


def suggest(word: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word[:_LONGEST], list(known), 1, _ALIKE)), None)


@contextmanager
def suggesting_snapshot(controller: Controller, tag: str) -> Iterator[None]:
    """An unknown tag inside gets the snapshot that was probably meant into its hint."""
    try:
        yield
    except NotFound as error:
        with suppress(ForkdError):
            if meant := suggest(tag, [info["tag"] for info in controller.list_snapshots()]):
                error.hint = f"Did you mean {meant}? {error.hint or 'List them with: forkd snapshot ls'}"
        raise
