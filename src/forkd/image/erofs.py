"""Read-only root file systems, by mkfs.erofs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT_FILE = "root.erofs"
# The same content is to give the same bytes, so nothing in the file system is random.
_UUID = "8f6d3c52-6f1e-4f0b-9d0a-666f726b6401"
# The guest mounts its own over these; the directories themselves stay as mount points.
MOUNTED_OVER = ("dev", "proc", "run", "sys", "tmp")


def render_mkfs(mkfs: Path, out: Path, root: Path, *, options: Sequence[str] = ()) -> list[str]:
    """No compression: a guest under emulation unpacks slower than the host reads.

    Times are kept: a .py file younger or older than its .pyc says would be compiled again at every boot.
    """
    excluded = f"^({'|'.join(MOUNTED_OVER)})/.+"
    return [
        str(mkfs),
        "--quiet",
        "--preserve-mtime",
        f"-U{_UUID}",
        f"--exclude-regex={excluded}",
        *options,
        str(out),
        str(root),
    ]
