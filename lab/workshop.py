"""Where on this host the lab keeps its things: the working tree, a home with images, results."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from forkd.host.paths import Home, find_home


@dataclass(frozen=True)
class Workshop:
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
        """Without those of an earlier run, unless somebody else chose the place: what is there may not be ours."""
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
