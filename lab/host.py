"""This host: where the lab keeps its things on it, whether it can be the lab itself, and a run on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forkd.host.cgroup import LIMITS
from forkd.host.files import staged_directory
from forkd.host.kvm import probe_kvm
from forkd.host.paths import Home, find_home
from lab.packs import digest_firecracker, fetch_firecracker
from lab.selection import MARKER, Asked

CONTROLLERS = frozenset(LIMITS)
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Workshop:
    """The working tree, a home with images, results."""

    tree: Path
    home: Home
    out: Path | None = None

    @property
    def kept(self) -> Path:
        return self.home.root / "lab"

    @property
    def packs(self) -> Path:
        return self.kept / "packs"

    @property
    def snapshots(self) -> Path:
        return self.kept / "snapshots"

    @property
    def results(self) -> Path:
        return self.out or self.tree / "build/lab"

    def clear_results(self) -> Path:
        """Removes the results of an earlier run, but nothing from a directory that FORKD_LAB_OUT names."""
        if self.out is None:
            shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir(parents=True, exist_ok=True)
        return self.results


def find_workshop() -> Workshop:
    """The tree that this file is in, the home that is kept for tests; FORKD_LAB_OUT may say where results go."""
    kept, out = os.environ.get("FORKD_TEST_HOME"), os.environ.get("FORKD_LAB_OUT")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Home((Path(kept) if kept else cache / "forkd/tests").absolute(), find_home().runtime)
    return Workshop(Path(__file__).resolve().parent.parent, home, Path(out).absolute() if out else None)


def find_lack() -> str | None:
    """What this host lacks, or None when tests for the lab can run here. The cheap checks come first."""
    if os.geteuid() != 0:
        return "not running as root"
    if missing := CONTROLLERS - read_controllers():
        return f"cgroup v2 lacks {', '.join(sorted(missing))}"
    verdict = probe_kvm()
    return None if verdict.usable else f"KVM is not usable: {verdict.explanation}"


def read_controllers(root: Path = _CGROUP) -> frozenset[str]:
    try:
        return frozenset((root / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()


def run_here(asked: Asked, command: str | None) -> int:
    shop = find_workshop()
    results = shop.clear_results()
    env = {**os.environ, "FORKD_LAB": "1", "FORKD_LAB_OUT": str(results), "FORKD_TEST_HOME": str(shop.home.root)}
    if shutil.which("firecracker") is None:
        env["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{ensure_firecracker(shop.kept)}"
    argv = ["/bin/sh", "-c", command or ""]
    if command is None:
        junit = f"--junitxml={results}/junit.xml"
        argv = [sys.executable, "-m", "pytest", "-m", MARKER, junit, *asked.tests, *asked.options]
    return subprocess.run(argv, cwd=shop.tree, env=env).returncode


def ensure_firecracker(kept: Path) -> Path:
    """A directory with the one that the lab machine has."""
    directory = kept / f"firecracker-{digest_firecracker()}"
    if not directory.is_dir():
        with staged_directory(directory) as staging:
            fetch_firecracker(staging)
    return directory
