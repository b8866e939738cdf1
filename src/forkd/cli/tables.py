"""How listings look: tables and sizes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 400


def print_table(table: Table) -> None:
    """Wrapped to a terminal; whole lines for whoever reads a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    console.print(table)


def render_size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
