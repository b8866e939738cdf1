"""tools/setup: it says each step and how long it took, and nothing when all is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forkd.host.paths import Home

ROOT = Path(__file__).parents[2]
STEPS = ["1/3 system packages: all there", "2/3 Python packages in .venv ...", "2/3 Python packages in .venv: N s"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone whose .venv has a pip that does what the file `pip` says, and whose image takes no time."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "tools/demo_image.py").write_text("import sys; print('setup:', sys.argv[1], 'image', file=sys.stderr)")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pip").write_text("exit 0\n")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" != -m ] || exec sh ./pip "$@"\n')
    python.chmod(0o755)
    return tmp_path


def set_up(tree: Path, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run([tree / "tools/setup", *words], stderr=subprocess.PIPE, text=True, timeout=60)
    lines = [line.removeprefix("setup: ") for line in done.stderr.splitlines()]
    return done.returncode, sorted(re.sub(r": \d+ s$", ": N s", line) for line in lines)


def test_every_step_is_said_with_its_seconds_and_the_second_time_nothing(tree: Path) -> None:
    assert set_up(tree, "server", "image") == (0, [*STEPS, "3/3 image"])
    assert set_up(tree, "server", "image") == (0, [])


def test_a_failure_ends_it_and_the_next_time_it_is_tried_again(tree: Path) -> None:
    (tree / "pip").write_text("echo 'setup: no network' >&2; exit 3\n")
    status, lines = set_up(tree, "server")
    assert status != 0 and "no network" in lines and not (tree / ".venv/.forkd-server").exists()
    (tree / "pip").write_text("exit 0\n")
    assert set_up(tree, "server") == (0, [line.replace("/3", "/2") for line in STEPS])


@pytest.mark.usefixtures("python_image")
def test_the_image_is_found_where_it_is_built(built_home: Home) -> None:
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tools/demo_image.py", "3/3"],
        env={**os.environ, "FORKD_HOME": str(built_home.root)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and re.search(r"^setup: 3/3 image of the VMs: \d+ s$", done.stderr, re.MULTILINE)
