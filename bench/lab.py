"""The part of a run that is measured in the lab, or on this host where it has what the lab has."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.host import describe_machine
from forkd.errors import EngineFailed
from lab.direct import run_here
from lab.emulated import run_in_machine
from lab.place import find_lack
from lab.selection import Asked
from lab.workshop import find_workshop

# Each round boots, freezes and forks two engines on an emulated machine.
ROUNDS = 3
SIZES = (1, 10, 30)
_FILE = "bench.json"


def measure_lab(rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    """The section of a report."""
    host, emulated = describe_machine(), find_lack() is not None
    command = render_command("python3" if emulated else sys.executable, rounds, sizes, emulated=emulated)
    status = run_in_machine(Asked(), command) if emulated else run_here(Asked(), command)
    section = read_section(find_workshop().results / _FILE, status)
    if emulated:
        section["host"]["emulated_on"] = host
    return section


def render_command(python: str, rounds: int, sizes: Sequence[int], *, emulated: bool) -> str:
    words = [python, "-m", "bench.lab_inside", "--rounds", str(rounds), *(["--emulated"] if emulated else [])]
    return f'{shlex.join(words)} -n {" ".join(map(str, sizes))} --out "$FORKD_LAB_OUT/{_FILE}"'


def read_section(path: Path, status: int) -> dict[str, Any]:
    """What was measured, with a failure where it ended before its end."""
    try:
        section = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineFailed(
            f"The measurement in the lab ended with exit status {status} before its first round"
        ) from None
    assert isinstance(section, dict)
    if status != 0:
        section["failures"].append(f"lab: ended with exit status {status}")
    return section
