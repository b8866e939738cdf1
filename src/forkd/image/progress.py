"""What a build says while it works."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def stage(self, text: str) -> None:
        """A new part of the work begins."""

    def line(self, text: str) -> None:
        """One line a tool printed."""


class Silent:
    def stage(self, text: str) -> None: ...

    def line(self, text: str) -> None: ...
