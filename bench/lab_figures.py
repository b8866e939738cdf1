"""What the lab adds to the figures of an engine: whose they are, and how two of them compare. Pure."""

from __future__ import annotations

from dataclasses import replace

from bench.figures import Figure

_SAME_ROUND = "both in the same round"
_SEE = "see the two figures"


def by_engine(engine: str, figure: Figure) -> Figure:
    return replace(figure, name=f"{engine}.{figure.name}", what=f"{engine}, {figure.what}")


def cold_to_fork(n: int) -> Figure:
    return Figure(f"ratio.cold_boot_to_fork_{n}", f"cold boot of one / fork of {n}", "", _SAME_ROUND, _SEE)


def versus(figure: Figure, engines: tuple[str, str]) -> Figure:
    return Figure(f"versus.{figure.name}", f"{figure.what}, {' / '.join(engines)}", "", _SAME_ROUND, _SEE)
