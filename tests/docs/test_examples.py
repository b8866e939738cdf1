"""The programs in examples/ work, with real VMs and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_daemon import environment, served

from forkd.host.paths import Home

EXAMPLES = Path(__file__).parents[2] / "examples"
# What runs beside a daemon rather than with one: test_secret_proxy.py.
APART = {"secret_proxy.py": "secrets.md"}
PROGRAMS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text() and path.name not in APART
)
_RUN_S = 300.0
_LINES = 120


@pytest.fixture(scope="module")
def wanted() -> dict[str, tuple[str, ...]]:
    """What each says when it went well."""
    return {
        "branch_and_pick.py": (r"goes on from there, lowest -?\d", r"the other 4 are gone"),
        "fix_tests.py": (
            r": divide exactly: \d of 4 tests fail",
            r": spread the rest: all tests pass",
            r"went too far, and was undone",
            r"share \+ \(each < total_cents % people\)",
        ),
        "parallel_pytest.py": (r"with (pytest|unittest)", r"one after the other: +\d", r"on 4 forks: +\d"),
    }


@pytest.mark.vm
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs_and_leaves_no_sandbox(vm_home: Home, wanted: dict[str, tuple[str, ...]], name: str) -> None:
    with served(vm_home, "--bind", "none", "--on-stop", "kill", engine="qemu") as daemon:
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, "warm"],
            env=environment(vm_home, "qemu"),
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
        with daemon.controller() as controller:
            assert controller.list_sandboxes() == []
            assert [info["tag"] for info in controller.list_snapshots()] == ["warm"]
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in wanted[name]:
        assert re.search(pattern, done.stdout), done.stdout


@pytest.mark.vm
def test_an_example_makes_its_snapshot_when_it_is_missing(fake_home: Home) -> None:
    with served(fake_home, "--bind", "none", "--on-stop", "kill", engine="qemu") as daemon:
        done = subprocess.run(
            [sys.executable, EXAMPLES / "branch_and_pick.py"],
            env=environment(fake_home, "qemu") | {"FORKD_TAG": "mine"},
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
        with daemon.controller() as controller:
            assert [info["tag"] for info in controller.list_snapshots()] == ["mine"], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("name", [*PROGRAMS, *APART])
def test_an_example_is_short_and_in_the_documents(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < _LINES
    assert f"examples/{name}" in (EXAMPLES.parent / "docs/how-to" / APART.get(name, "branch.md")).read_text()
    assert os.access(EXAMPLES / name, os.R_OK)
