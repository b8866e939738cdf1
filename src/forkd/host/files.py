"""Files that get their final name only when complete and synced; checksums, remembered while a file is unchanged."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import Conflict, NoCapacity, SnapshotDamaged
from forkd.host.chunks import count_chunks, hash_chunks, join_hashes, render_place
from forkd.host.tools import find_tool
from forkd.host.trees import remove_directory

STAGING_PREFIX = ".staging-"
STAMPS = ".verified"
# File times move in steps of the kernel's tick: two changes within one step look the same.
_CLOCK_STEP_NS = 20_000_000
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
    """Free the space that zeros take in a file, where its file system can."""
    subprocess.run(
        [find_tool("fallocate"), "--dig-holes", str(path)], capture_output=True, timeout=_DIG_DEADLINE_S, check=False
    )


@contextmanager
def owned(path: Path, taken: str, hint: str) -> Iterator[None]:
    """Hold the lock `path` alone, or raise Conflict. The file shows our pid; the kernel drops the lock when we die."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise Conflict(f"{taken} (pid {pid})" if pid else taken, hint=hint) from None
        with contextlib.suppress(OSError):  # on a full disk the lock counts, whatever the file shows
            os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
        yield
    finally:
        os.close(fd)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A hidden directory in `parent`, removed afterwards.

    It is locked while we live, so that `sweep_staging` can tell what a crash left from work in progress.
    """
    with enough_disk(parent):
        parent.mkdir(parents=True, exist_ok=True)
        staging, fd = _make_locked(parent)
        try:
            yield staging
        finally:
            remove_directory(staging)
            os.close(fd)


@contextmanager
def staged_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a scratch directory beside `final`; on success sync it and rename it there, else remove it."""
    with scratch_directory(final.parent) as staging:
        yield staging
        _sync_tree(staging)
        _publish(staging, final, replace=replace)


def publish_directory(staging: Path, final: Path, *, replace: bool = False) -> None:
    """Sync a directory that is complete and give it its name. What had that name is then in `staging`."""
    _sync_tree(staging)
    _publish(staging, final, replace=replace)


def sweep_staging(parent: Path) -> list[Path]:
    """Remove staging directories whose maker has died; returns what was removed."""
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
        # In one step, so that `final` always exists; the old one is then removed as our staging.
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
        # Before we had the lock, a sweep may have removed the directory as a leftover.
        if staging.exists():
            return staging, fd
        os.close(fd)


def _remove_unheld(path: Path) -> bool:
    """Under its lock, so that its maker cannot begin to use it meanwhile. False when the lock is held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_directory(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@dataclass(frozen=True)
class FileSum:
    """With `chunks`, the hashes of its chunks, `sha256` is that of those; without, of the file's bytes."""

    size: int
    sha256: str
    chunks: tuple[str, ...] = ()


def digest_file(path: Path) -> FileSum:
    with path.open("rb") as file:
        return FileSum(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def digest_chunks(path: Path) -> FileSum:
    size, chunks = hash_chunks(path)
    return FileSum(size, join_hashes(chunks), chunks)


def dump_sums(sums: Mapping[str, FileSum]) -> dict[str, Any]:
    return {
        name: {"size": entry.size, "sha256": entry.sha256, **({"chunks": list(entry.chunks)} if entry.chunks else {})}
        for name, entry in sums.items()
    }


def parse_sums(raw: object) -> dict[str, FileSum]:
    """Raises ValueError on anything but {name: {size, sha256, chunks?}}."""
    if not isinstance(raw, dict):
        raise ValueError("not a table of files")
    sums = {}
    for name, entry in raw.items():
        # They become paths, so each must be one plain name.
        if not isinstance(entry, dict) or {"/", "\0"} & set(name) or name in ("", ".", ".."):
            raise ValueError(f"bad entry for file {name!r}")
        size, sha256 = entry.get("size"), entry.get("sha256")
        if type(size) is not int or not isinstance(sha256, str):
            raise ValueError(f"bad entry for file {name!r}")
        sums[name] = FileSum(size, sha256, _parse_chunks(entry.get("chunks", []), size, sha256))
    return sums


def _parse_chunks(raw: object, size: int, sha256: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or (raw and len(raw) != count_chunks(size)):
        raise ValueError("not the chunks of that file")
    if raw and (not all(isinstance(chunk, str) and len(chunk) == 64 for chunk in raw) or join_hashes(raw) != sha256):
        raise ValueError("not the hashes of chunks")
    return tuple(raw)


def verify_sizes(directory: Path, sums: Mapping[str, FileSum], *, what: str, hint: str) -> dict[str, os.stat_result]:
    """Raise SnapshotDamaged, naming the file, unless each is present and whole. Nothing is read."""
    seen = {}
    for name, wanted in sums.items():
        with _damage_named(name, what, hint):
            info = (directory / name).stat()
        if info.st_size != wanted.size:
            raise SnapshotDamaged(
                f"The file {name} of {what} has {info.st_size} bytes instead of {wanted.size}", hint=hint
            )
        seen[name] = info
    return seen


def verify_files(directory: Path, sums: Mapping[str, FileSum], *, what: str, hint: str, anew: bool = False) -> None:
    """Raise SnapshotDamaged, naming the file and its chunk, unless each is present, whole and unaltered.

    A file that passed is not read again until its inode, size or times change: a fork must not hash 512 MiB. `anew`:
    all are read.
    """
    remembered = _read_stamps(directory)
    looked_at_ns = time.time_ns()
    stamps = {}
    for name, info in verify_sizes(directory, sums, what=what, hint=hint).items():
        sha256 = sums[name].sha256
        stamp = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}:{sha256}"
        if anew or remembered.get(name) != stamp:
            _verify_content(directory / name, sums[name], what=what, hint=hint)
        if looked_at_ns - info.st_ctime_ns > _CLOCK_STEP_NS:
            stamps[name] = stamp
    if stamps != remembered:
        _write_stamps(directory, stamps)


def _verify_content(path: Path, wanted: FileSum, *, what: str, hint: str) -> None:
    with _damage_named(path.name, what, hint):
        found = digest_chunks(path) if wanted.chunks else digest_file(path)
    if found.sha256 == wanted.sha256:
        return
    altered = f"The file {path.name} of {what} was altered"
    for number, (was, now) in enumerate(zip(wanted.chunks, found.chunks, strict=False)):
        if was != now:
            place = render_place(number, wanted.size)
            raise SnapshotDamaged(f"{altered}: chunk {number} of {path.name}, {place}, does not match", hint=hint)
    raise SnapshotDamaged(f"{altered}: its checksum does not match", hint=hint)


@contextmanager
def _damage_named(name: str, what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise SnapshotDamaged(f"The file {name} of {what} is missing", hint=hint) from None
    except OSError as error:
        raise SnapshotDamaged(f"The file {name} of {what} cannot be read: {error.strerror}", hint=hint) from error


def _read_stamps(directory: Path) -> dict[str, Any]:
    try:
        raw = json.loads((directory / STAMPS).read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _write_stamps(directory: Path, stamps: Mapping[str, str]) -> None:
    try:
        write_atomic(directory / STAMPS, json.dumps(stamps).encode())
    except (OSError, NoCapacity):
        pass  # a read-only or full store is verified again each time, which is slow but right
