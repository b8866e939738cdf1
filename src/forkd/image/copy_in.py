"""A program that the image's own Python runs while the image is built: put files where a `--copy` wants them.

    copy_in.py SOURCE DESTINATION NAME

A directory's content goes into the destination. A file becomes the destination, or goes into it under NAME if it is
a directory or ends with a slash. Links stay links; modes and times are kept; everything belongs to root.
Standard library only, Python 3.8; no recursion.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys


def main(source: str, destination: str, name: str) -> None:
    existed = os.path.isdir(destination)
    if os.path.isdir(source):
        os.makedirs(destination, exist_ok=True)
    elif destination.endswith("/") or os.path.isdir(destination):
        os.makedirs(destination, exist_ok=True)
        destination = os.path.join(destination, name)
    else:
        os.makedirs(os.path.dirname(destination), exist_ok=True)
    todo = [(source, destination)]
    entered = []
    while todo:
        here, there = todo.pop()
        info = os.lstat(here)
        if stat.S_ISDIR(info.st_mode):
            if not os.path.isdir(there):
                os.mkdir(there)
            entered.append((there, info))
            todo += [(os.path.join(here, inner), os.path.join(there, inner)) for inner in os.listdir(here)]
        else:
            put(here, there, info)
    # Afterwards and from below, as writing into a directory changes its time, and may need a mode it will not have.
    for there, info in reversed(entered):
        if there != destination or not existed:
            set_mode_and_times(there, info)


def put(here: str, there: str, info: os.stat_result) -> None:
    if os.path.lexists(there):
        # Also a link: what it leads to stays as it is.
        os.unlink(there)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(here), there)
        os.utime(there, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
    else:
        shutil.copyfile(here, there, follow_symlinks=False)
        set_mode_and_times(there, info)


def set_mode_and_times(there: str, info: os.stat_result) -> None:
    os.chmod(there, stat.S_IMODE(info.st_mode))
    os.utime(there, ns=(info.st_atime_ns, info.st_mtime_ns))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
