"""What commands print: tables, JSON, notes, sizes and times.

Rich takes 60 ms to import, and a base install does not have it: it is imported when a table is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_PIPE_WIDTH = 400
_FOLDED_WIDTH = 12
_GAP = 2


def open_console() -> Console:
    """Lines wrap at the width of a terminal, and not at all in a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]], *, folded: Container[str] = ()) -> None:
    """A listing with a heading. On a narrow terminal only the columns in `folded` wrap; nothing is cut off."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [[render_plain(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(headings, *lines, strict=True)]
    least = [
        min(width, _FOLDED_WIDTH) if name in folded else width for name, width in zip(headings, widths, strict=True)
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in folded, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console = open_console()
    gaps = _GAP * (len(headings) - 1)
    if sum(least) + gaps > console.width:
        # Too narrow for a table: the terminal wraps whole lines, and what is copied from it is whole.
        console = Console(highlight=False, width=sum(widths) + gaps)
    console.print(table, crop=False)


def print_columns(rows: Sequence[Mapping[str, str]], headings: Iterable[str], always: Container[str]) -> None:
    """A listing without the columns that are empty, except those that are `always` shown; long ones fold."""
    shown = [name for name in headings if name in always or any(row[name] for row in rows)]
    print_rows(shown, ([row[name] for name in shown] for row in rows), folded=("LABELS", "CAUSE", "WARM"))


def print_facts(facts: Mapping[str, Any]) -> None:
    """One thing, with a line for each of its properties."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(render_plain(value if isinstance(value, str) else json.dumps(value))))
    open_console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def print_json(value: Any) -> None:
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
