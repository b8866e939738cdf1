"""Trees of directories that ordinary walks fail on."""

import os
from pathlib import Path

from forkd.host.trees import descended

# Deeper than Python recurses, and deeper than descriptors may be open.
LEVELS = 1100


def make_deep(top: Path, levels: int = LEVELS, name: str = "directory") -> None:
    """Directories in each other, with a file in the last. With the usual name, its path is too long to be given."""
    top.mkdir()
    with descended(top) as descent:
        for _ in range(levels):
            os.mkdir(name, dir_fd=descent.fd)
            descent.enter(name)
        os.close(os.open("end", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=descent.fd))
