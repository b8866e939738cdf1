"""Checksums of large files, computed once and remembered for as long as the file is not touched."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forkd.errors import NoCapacity, SnapshotDamaged
from forkd.host.files import write_atomic


@dataclass(frozen=True)
class FileSum:
    size: int
    sha256: str


def digest_file(path: Path) -> FileSum:
    with path.open("rb") as file:
        return FileSum(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def dump_sums(sums: Mapping[str, FileSum]) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in sums.items()}


def parse_sums(raw: object) -> dict[str, FileSum]:
    """Raises ValueError on anything but {name: {size, sha256}}."""
    if not isinstance(raw, dict):
        raise ValueError("not a table of files")
    sums = {}
    for name, entry in raw.items():
        # They become paths, so each has to be one plain name.
        if not isinstance(entry, dict) or {"/", "\0"} & set(name) or name in ("", ".", ".."):
            raise ValueError(f"bad entry for file {name!r}")
        size, sha256 = entry.get("size"), entry.get("sha256")
        if type(size) is not int or not isinstance(sha256, str):
            raise ValueError(f"bad entry for file {name!r}")
        sums[name] = FileSum(size, sha256)
    return sums


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


def verify_files(directory: Path, sums: Mapping[str, FileSum], *, what: str, hint: str) -> None:
    """Raise SnapshotDamaged, naming the file, unless each is present, whole and unaltered.

    A file that passed is not read again until its inode, size or times change: a fork must not hash 512 MiB.
    """
    remembered = _read_stamps(directory)
    looked_at_ns = time.time_ns()
    stamps = {}
    for name, info in verify_sizes(directory, sums, what=what, hint=hint).items():
        sha256 = sums[name].sha256
        stamp = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}:{sha256}"
        if remembered.get(name) != stamp:
            with _damage_named(name, what, hint):
                found = digest_file(directory / name)
            if found.sha256 != sha256:
                raise SnapshotDamaged(f"The file {name} of {what} was altered: its checksum does not match", hint=hint)
        if looked_at_ns - info.st_ctime_ns > _CLOCK_STEP_NS:
            stamps[name] = stamp
    if stamps != remembered:
        _write_stamps(directory, stamps)


@contextmanager
def _damage_named(name: str, what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise SnapshotDamaged(f"The file {name} of {what} is missing", hint=hint) from None
    except OSError as error:
        raise SnapshotDamaged(f"The file {name} of {what} cannot be read: {error.strerror}", hint=hint) from error


STAMPS = ".verified"
# File times move in steps of the kernel's tick: two changes within one look the same, so what is younger is no proof.
_CLOCK_STEP_NS = 20_000_000


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
        pass  # a read-only or full store is verified anew each time, which is slow but right
