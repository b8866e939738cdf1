"""Packs: what is brought into the lab machine. Each is one erofs file, mounted there read-only under its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.host.tools import find_tool, run_tool
from forkd.image.pieces import Piece, obtain_piece

_PACK_FILE = "pack.erofs"
_MKFS_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Pack:
    name: str
    piece: Piece

    @property
    def file(self) -> Path:
        return self.piece.dir / _PACK_FILE

    @property
    def sha256(self) -> str:
        return self.piece.files[_PACK_FILE].sha256


def obtain_pack(packs: Path, name: str, key: str, fill: Callable[[Path], None]) -> Pack:
    """The pack that was made for `key`, or one made now: `fill` puts its contents into a directory."""

    def make(out: Path, work: Path) -> dict[str, object]:
        contents = work / name
        contents.mkdir()
        fill(contents)
        write_erofs(out / _PACK_FILE, contents)
        return {}

    return Pack(name, obtain_piece(packs, name, key, make))


def write_erofs(out: Path, contents: Path) -> None:
    run_tool(
        render_mkfs(find_tool("mkfs.erofs"), out, contents),
        doing=f"Packing {contents.name}",
        failure=BuildFailed,
        deadline_s=_MKFS_DEADLINE_S,
        disk=out.parent,
    )


def render_mkfs(mkfs: Path, out: Path, contents: Path) -> list[str]:
    """Compressed: a pack goes through the agent's channel, which is slower than unpacking.

    Times are kept: compiled Python that is in the machine already is good for as long as its source has the same.
    """
    return [str(mkfs), "--quiet", "--preserve-mtime", "--all-root", "-zlz4", "-C65536", str(out), str(contents)]
