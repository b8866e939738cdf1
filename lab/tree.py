"""The working tree as a pack: what git knows or would add, as it is now."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.host.files import scratch_directory
from lab.inside import TREE
from lab.packs import write_erofs

_GIT_DEADLINE_S = 60.0


def list_files(root: Path) -> list[str]:
    """Without what git ignores. A file that git knows may be gone."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            timeout=_GIT_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed("Git does not list the files of the working tree", hint="The lab runs in a clone") from error
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    return sorted(name for name in names if os.path.lexists(root / name))


@contextmanager
def packed_tree(root: Path, scratch_in: Path) -> Iterator[Path]:
    """The tree as an erofs file; gone afterwards."""
    with scratch_directory(scratch_in) as scratch:
        copy = scratch / TREE
        for name in list_files(root):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(root / name, copy / name, follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
        out = scratch / f"{TREE}.erofs"
        write_erofs(out, copy)
        yield out
