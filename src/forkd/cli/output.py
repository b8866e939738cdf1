"""What commands print: tables, JSON, notes, sizes and times.

Listings are rendered here: rich takes longer to import than the daemon to answer, and a base install does not have it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")

_FOLDED_WIDTH = 12
_GAP = 2


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]], *, folded: Container[str] = ()) -> None:
    """A listing with a heading. On a narrow terminal only the columns in `folded` wrap; nothing is cut off."""
    lines = [[render_plain(cell) for cell in row] for row in rows]
    bold = sys.stdout.isatty()
    for number, line in enumerate(render_table(headings, lines, find_width(), folded)):
        print(f"\x1b[1m{line}\x1b[0m" if bold and number == 0 else line)


def find_width() -> int | None:
    """Of the terminal; None where output goes elsewhere, and lines do not wrap."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def render_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, folded: Container[str]
) -> list[str]:
    """Columns as wide as their longest cell; those that may fold share what is missing in `width`."""
    widths = [max(map(measure, column)) for column in zip(headings, *rows, strict=True)]
    if width is not None:
        excess = sum(widths) + _GAP * (len(widths) - 1) - width
        room = [
            each - min(each, max(_FOLDED_WIDTH, measure(name))) if name in folded else 0
            for name, each in zip(headings, widths, strict=True)
        ]
        # Too narrow even so: the terminal wraps whole lines, and what is copied from it is whole.
        if 0 < excess <= sum(room):
            for index in sorted(range(len(widths)), key=lambda index: -room[index]):
                taken = min(room[index], excess)
                widths[index] -= taken
                excess -= taken
    lines = []
    for row in (headings, *rows):
        cells = [_fold(cell, each) for cell, each in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = (part + " " * (each - measure(part)) for part, each in zip(parts, widths, strict=True))
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _fold(text: str, width: int) -> list[str]:
    """Pieces of at most this width, cut between any two characters: identifiers have no spaces."""
    pieces, piece, used = [], "", 0
    for each in text:
        size = measure(each)
        if piece and used + size > width:
            pieces.append(piece)
            piece, used = "", 0
        piece, used = piece + each, used + size
    return [*pieces, piece]


def measure(text: str) -> int:
    """Columns on a terminal: wide characters take two, those that combine with others none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def print_columns(rows: Sequence[Mapping[str, str]], headings: Iterable[str], always: Container[str]) -> None:
    """A listing without the columns that are empty, except those that are `always` shown; long ones fold."""
    shown = [name for name in headings if name in always or any(row[name] for row in rows)]
    print_rows(shown, ([row[name] for name in shown] for row in rows), folded=("LABELS", "CAUSE", "WARM", "NOTE"))


def print_facts(facts: Mapping[str, Any]) -> None:
    """One thing, with a line for each of its properties; long ones fold."""
    import json

    texts = {
        name: render_plain(value if isinstance(value, str) else json.dumps(value)) for name, value in facts.items()
    }
    name_width = max(map(len, texts), default=0)
    width = find_width()
    for name, text in texts.items():
        room = None if width is None else width - name_width - _GAP
        first, *more = [text] if room is None or room < _FOLDED_WIDTH else _fold(text, room)
        print(f"{name:{name_width}}{' ' * _GAP}{first}".rstrip())
        print_lines(" " * (name_width + _GAP) + line for line in more)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


def show(args: argparse.Namespace, value: T, print_plain: Callable[[T], object] | None = None) -> int:
    """The result of a command, as JSON when that was asked for. Returns the exit code."""
    if args.json:
        print_json(value)
    elif print_plain is not None:
        print_plain(value)
    return 0


def note(text: str) -> None:
    """For the person at the terminal: on standard error, apart from the results."""
    print(render_plain(text), file=sys.stderr)


def render_plain(text: str) -> str:
    """Control characters and lone surrogates as escapes: a guest must not move our cursor or rename our window."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\t" else ascii(each)[1:-1] for each in text)


def render_size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def render_age(age_s: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length:
            return f"{int(age_s // length)}{unit}"
    return f"{max(0, int(age_s))}s"


def render_time(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
