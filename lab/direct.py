"""A run on this host, which has all that the lab machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from forkd.host.files import staged_directory
from lab.contents import digest_firecracker, fetch_firecracker
from lab.selection import MARKER, Asked
from lab.workshop import find_workshop


def run_here(asked: Asked, command: str | None) -> int:
    shop = find_workshop()
    results = shop.clear_results()
    env = {**os.environ, "FORKD_LAB": "1", "FORKD_LAB_OUT": str(results), "FORKD_TEST_HOME": str(shop.home.root)}
    if shutil.which("firecracker") is None:
        env["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{ensure_firecracker(shop.kept)}"
    return subprocess.run(render_command(asked, command, results), cwd=shop.tree, env=env).returncode


def render_command(asked: Asked, command: str | None, results: Path) -> list[str]:
    if command is not None:
        return ["/bin/sh", "-c", command]
    junit = f"--junitxml={results}/junit.xml"
    return [sys.executable, "-m", "pytest", "-m", MARKER, junit, *asked.tests, *asked.options]


def ensure_firecracker(kept: Path) -> Path:
    """A directory with the one that the lab machine has."""
    directory = kept / f"firecracker-{digest_firecracker()}"
    if not directory.is_dir():
        with staged_directory(directory) as staging:
            fetch_firecracker(staging)
    return directory
