"""Directory trees of any depth, walked by descriptors: no path is followed twice, and one descriptor is open at a time.

Python's own walks (os.walk, shutil.rmtree) recurse, and fail at a thousand levels.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Descent:
    """The directory where a walk is. A directory that is swapped for a link or moved meanwhile is an OSError."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._above: list[tuple[int, int]] = []

    def enter(self, name: str) -> None:
        fd = os.open(name, _OPEN, dir_fd=self.fd)
        self._above.append(_identity(self.fd))
        self._move(fd)

    def leave(self) -> None:
        fd = os.open("..", _OPEN, dir_fd=self.fd)
        if _identity(fd) != self._above.pop():
            os.close(fd)
            raise OSError(errno.ESTALE, "A directory was moved while it was walked")
        self._move(fd)

    def _move(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


@contextmanager
def descended(path: str | Path) -> Iterator[Descent]:
    """A walk that begins in a directory, which must not be a link."""
    descent = Descent(os.open(path, _OPEN))
    try:
        yield descent
    finally:
        os.close(descent.fd)


def remove_directory(path: Path) -> None:
    """Remove a tree as far as we may; what cannot be removed stays."""
    with suppress(OSError):
        with descended(path) as descent:
            _empty(descent)
        path.rmdir()


def _empty(descent: Descent) -> None:
    entered: list[str] = []
    # For each directory that we are in: the directories in it that are not removed yet.
    todo = [_unlink_files(descent.fd)]
    while todo:
        if todo[-1]:
            name = todo[-1].pop()
            with suppress(OSError):
                descent.enter(name)
                entered.append(name)
                todo.append([])
                todo[-1] += _unlink_files(descent.fd)
            continue
        todo.pop()
        if entered:
            descent.leave()
            with suppress(OSError):
                os.rmdir(entered.pop(), dir_fd=descent.fd)


def _unlink_files(fd: int) -> list[str]:
    """The names of the directories, which are left."""
    directories = []
    with os.scandir(fd) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                with suppress(OSError):
                    os.unlink(entry.name, dir_fd=fd)
    return directories


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
