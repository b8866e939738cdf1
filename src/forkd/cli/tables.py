"""How listings look: tables, sizes, times. Rich takes 60 ms to import, and a base install has none: only when shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forkd.cli.plain import render_plain

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 400
_FOLDED_WIDTH = 12
_GAP = 2


def open_console() -> Console:
    """Wrapped to a terminal; whole lines for whoever reads a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]], *, folded: Container[str] = ()) -> None:
    """A listing with a heading. On a narrow terminal only the columns `folded` give way; nothing is ever cut off."""
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


def print_facts(facts: Mapping[str, Any]) -> None:
    """One thing, a line for each of its properties."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(render_plain(value if isinstance(value, str) else json.dumps(value))))
    open_console().print(table)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def note(text: str) -> None:
    """A word to the person at the terminal, beside the results."""
    print(render_plain(text), file=sys.stderr)


def render_size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def render_age(age_s: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length:
            return f"{int(age_s // length)}{unit}"
    return f"{max(0, int(age_s))}s"


def render_time(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
