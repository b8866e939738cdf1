"""What a contract test is given."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.engines.base import Engine, Frozen


@dataclass(frozen=True)
class Case:
    """An engine and a parent frozen by it."""

    engine: Engine
    frozen: Frozen
