"""Progress on standard error: what is being done now, on a terminal with the latest line under way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Shown:
    """`stage` begins a part of the work; `line` is news of it that need not stay on the screen."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._stage = ""
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def stage(self, text: str) -> None:
        if self._quiet or text == self._stage:
            return
        self._stop()
        self._stage = text
        if self._console.is_terminal:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._console.print(Text(text))

    def line(self, text: str) -> None:
        if self._status is not None:
            latest = Text(f"{self._stage}  ")
            latest.append(text, style="dim")
            latest.truncate(max(20, self._console.width - 4), overflow="ellipsis")
            self._status.update(latest)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
            self._console.print(Text(self._stage))
