"""Files and directories that appear under their final name only when complete and synced."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.errors import Conflict, HostLacks, NoCapacity

STAGING_PREFIX = ".staging-"
_DIG_DEADLINE_S = 600.0
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold an advisory lock on `path` (made when absent). The kernel drops it when we die."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def dig_holes(path: Path) -> None:
    """Give back the space of zeros in a file, where its file system can."""
    fallocate = shutil.which("fallocate")
    if fallocate is None:
        raise HostLacks("fallocate is not installed", hint="Install the package util-linux")
    subprocess.run([fallocate, "--dig-holes", str(path)], capture_output=True, timeout=_DIG_DEADLINE_S, check=False)


@contextmanager
def owned(path: Path, taken: str, hint: str) -> Iterator[None]:
    """Hold the lock `path` alone, or raise Conflict. It holds our pid, for people; the kernel drops it when we die."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise Conflict(f"{taken} (pid {pid})" if pid else taken, hint=hint) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A hidden directory in `parent`, removed afterwards.

    It is locked for as long as we live, so `sweep_staging` can tell leftovers of a crash from work in progress.
    """
    with enough_disk(parent):
        parent.mkdir(parents=True, exist_ok=True)
        staging, fd = _make_locked(parent)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(fd)


@contextmanager
def staged_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a scratch directory beside `final`; on success sync it and rename it there, else remove it."""
    with scratch_directory(final.parent) as staging:
        yield staging
        _sync_tree(staging)
        _publish(staging, final, replace=replace)


def sweep_staging(parent: Path) -> list[Path]:
    """Remove staging directories whose maker is gone; returns what was removed."""
    if not parent.is_dir():
        return []
    removed = []
    for path in parent.iterdir():
        if path.name.startswith(STAGING_PREFIX) and _remove_unheld(path):
            removed.append(path)
    return removed


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with enough_disk(path.parent):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            temporary.rename(path)
            _sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def enough_disk(where: Path) -> Iterator[None]:
    """Turn 'no space left' into a typed error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoCapacity(
            f"No space left on the file system of {where}", hint="Free some space or set FORKD_HOME to another disk"
        ) from error


def _publish(staging: Path, final: Path, *, replace: bool) -> None:
    if replace and final.exists():
        # In one step, so that there is no instant without a `final`; the old one is then removed as our staging.
        _exchange(staging, final)
    else:
        try:
            staging.rename(final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise Conflict(f"{final.name} exists already") from error
            raise
    _sync_path(final.parent)


def _exchange(one: Path, other: Path) -> None:
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                _sync_path(path)
        _sync_path(Path(directory))


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_locked(parent: Path) -> tuple[Path, int]:
    """A new staging directory and the descriptor that holds its lock."""
    while True:
        staging = parent / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
        staging.mkdir(mode=0o700)
        try:
            fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Before the lock was ours, a sweep may have taken the directory for a leftover.
        if staging.exists():
            return staging, fd
        os.close(fd)


def _remove_unheld(path: Path) -> bool:
    """Under its lock, so that its maker cannot begin to use it meanwhile. False when somebody holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
