"""Pieces of images: a root, a kernel, an initramfs. Made once per request, shared by images that name them.

A piece is a directory `<kind>-<key>-<nonce>` with its files and a `piece.json`. The key is a digest of what was
asked for, so the same request finds it again; the nonce lets a fresh build of the same request stand beside the one
that images already name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forkd.errors import SnapshotDamaged
from forkd.host.files import (
    FileSum,
    digest_file,
    dump_sums,
    locked,
    parse_sums,
    staged_directory,
    sweep_staging,
    write_atomic,
)
from forkd.host.tools import remove_tree
from forkd.host.trees import remove_directory

FORMAT = 1
_DESCRIPTION = "piece.json"
_NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    dir: Path
    created: float
    files: dict[str, FileSum]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.dir.name


# Called with the directory for the piece's files and one for work that goes away; returns the piece's facts.
Make = Callable[[Path, Path], dict[str, Any]]


def digest_request(**asked: Any) -> str:
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def obtain_piece(pieces: Path, kind: str, key: str, make: Make, *, fresh: bool = False) -> Piece:
    """The newest whole piece of this request, or one made now. Two callers at once get the same one."""
    if not fresh and (found := find_piece(pieces, kind, key)) is not None:
        return found
    pieces.mkdir(parents=True, exist_ok=True)
    asked_at = time.time()
    with locked(pieces / f".lock-{kind}-{key}"):
        found = find_piece(pieces, kind, key)
        # Another build may have made it while we waited for the lock.
        if found is not None and (not fresh or found.created >= asked_at):
            return found
        return _make_piece(pieces, f"{kind}-{key}-{secrets.token_hex(4)}", make)


def find_piece(pieces: Path, kind: str, key: str) -> Piece | None:
    whole = []
    for path in pieces.glob(f"{kind}-{key}-*"):
        try:
            piece = load_piece(path)
        except SnapshotDamaged:
            continue
        if all(_has_size(path / name, wanted.size) for name, wanted in piece.files.items()):
            whole.append(piece)
    return max(whole, key=lambda piece: piece.created, default=None)


def load_piece(path: Path) -> Piece:
    try:
        value = json.loads((path / _DESCRIPTION).read_text())
        return Piece(path, float(value["created"]), parse_sums(value["files"]), dict(value["facts"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotDamaged(
            f"The description of the image piece {path.name} is missing or damaged", hint="Build the image again"
        ) from error


def sweep_pieces(pieces: Path) -> None:
    """Remove what killed builds left behind."""
    for path in sweep_staging(pieces):
        if path.exists():
            remove_tree(path)


def collect_pieces(pieces: Path, named: set[str]) -> None:
    """Remove pieces no image names. The caller makes sure that no build runs."""
    for path in pieces.iterdir() if pieces.is_dir() else ():
        if path.name.startswith(".lock-"):
            path.unlink(missing_ok=True)
        elif not path.name.startswith(".") and path.name not in named:
            # First, so that what is left when we are stopped half-way does not count as a piece.
            (path / _DESCRIPTION).unlink(missing_ok=True)
            remove_directory(path)


def _make_piece(pieces: Path, name: str, make: Make) -> Piece:
    sweep_pieces(pieces)
    with staged_directory(pieces / name) as staging:
        work = staging / "work"
        work.mkdir()
        facts = make(staging, work)
        remove_tree(work)
        describe_piece(staging, {path.name: digest_file(path) for path in sorted(staging.iterdir())}, facts)
    return load_piece(pieces / name)


def describe_piece(
    directory: Path, sums: Mapping[str, FileSum], facts: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Complete a piece whose files are there."""
    value = {"format": FORMAT, "created": time.time(), "files": dump_sums(sums), "facts": dict(facts)}
    write_atomic(directory / _DESCRIPTION, json.dumps(value, indent=1).encode())
    # The VMM may run as another user.
    for name_inside in sums:
        (directory / name_inside).chmod(0o644)
    directory.chmod(0o755)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.lstat().st_size == size
    except OSError:
        return False
