"""A runtime directory whose paths are short, and that has to be empty again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []
