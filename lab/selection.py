"""Which test files have tests for the lab, found on this host: in the lab, collecting the whole suite takes a minute.

It is also the pytest plugin that writes them down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    import pytest

MARKER = "lab"
_LIST = "FORKD_LAB_LIST"
_COLLECT_DEADLINE_S = 300.0
# pytest's exit status.
_NO_TESTS = 5


@dataclass(frozen=True)
class Asked:
    """Tests as pytest names them (directories, files, path::test), and further options for pytest."""

    tests: tuple[str, ...] = ("tests",)
    options: tuple[str, ...] = ()


def pytest_collection_finish(session: pytest.Session) -> None:
    Path(os.environ[_LIST]).write_text("\n".join(item.nodeid.partition("::")[0] for item in session.items))


def select(root: Path, asked: Asked, parts: int = 1) -> list[Asked]:
    """The same, in at most `parts` parts of about as many tests each.

    Directories are replaced by the files in them that have tests for the lab, relative to the tree.
    """
    status, files, output = collect(root, asked)
    if status not in (0, _NO_TESTS):
        raise InvalidInput("The tests for the lab cannot be collected", details=output.strip()[-8000:])
    if not files:
        raise NotFound(
            f"No test for the lab in {' '.join(asked.tests)}", hint=f"They are marked with pytest.mark.{MARKER}"
        )
    tests = narrow([render_relative(test, root) for test in asked.tests], list(files))
    return [Asked(part, asked.options) for part in divide(tests, files, parts)]


def divide(tests: Sequence[str], counts: Mapping[str, int], parts: int) -> list[tuple[str, ...]]:
    """The largest first, each to the part that has the fewest tests yet."""
    groups: list[list[str]] = [[] for _ in range(min(parts, len(tests)))]
    for test in sorted(tests, key=lambda test: -counts.get(test, 1)):
        min(groups, key=lambda group: sum(counts.get(one, 1) for one in group)).append(test)
    return [tuple(group) for group in groups]


def render_relative(test: str, root: Path) -> str:
    path, colons, name = test.partition("::")
    return os.path.relpath(root / path, root) + colons + name


def narrow(tests: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """Those that name a test stay as they are; of the rest, the files that are in them."""
    named = [test for test in tests if "::" in test]
    wide = [test for test in tests if "::" not in test]
    found = [file for file in files if any(Path(file).is_relative_to(test) for test in wide)]
    return tuple(dict.fromkeys([*named, *found]))


def collect(root: Path, asked: Asked) -> tuple[int, Counter[str], str]:
    """pytest's exit status, how many tests each file has, and what pytest said."""
    with tempfile.NamedTemporaryFile("r", prefix="forkd-lab-") as written:
        try:
            done = subprocess.run(
                render_collect(asked),
                cwd=root,
                env={**os.environ, _LIST: written.name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_COLLECT_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidInput(f"Collecting the tests did not end within {_COLLECT_DEADLINE_S:g} s") from error
        return done.returncode, Counter(written.read().splitlines()), done.stdout


def render_collect(asked: Asked) -> list[str]:
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "lab.selection"]
    return [*pytest, "--collect-only", "-qq", "-m", MARKER, *asked.tests, *asked.options]
