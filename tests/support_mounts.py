"""File systems that a test mounts, and that are gone at its end."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def mounted(where: Path, source: Path | str = "none", *options: str) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(source), str(where)], stderr=subprocess.PIPE, text=True)
    if "permission denied" in done.stderr:
        pytest.skip("this root may not mount")
    assert done.returncode == 0, done.stderr
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def small_disk(where: Path, size: str) -> AbstractContextManager[Path]:
    """A file system that is full soon, and only ours."""
    return mounted(where, "none", "-t", "tmpfs", "-o", f"size={size},mode=700")
