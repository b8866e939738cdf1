"""Trees of files: one to copy, and what there is to compare in two of them."""

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def make_tree(root: Path, files: int = 1000) -> None:
    """Small files in ten directories, with links, modes and times that a new file would not have."""
    root.mkdir()
    for number in range(files):
        directory = root / f"d{number % 10}/deep"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"file-{number}"
        path.write_bytes(b"%d\n" % number * 100)
        path.chmod(0o600 + 0o111 * (number % 2) + number % 8)
        os.utime(path, ns=(0, 1_000_000_000_123_456_789 + number))
    (root / "d0/deep" / ("long-" * 30)).write_text("a name that ustar has no room for")
    (root / "d1/to-file").symlink_to("deep/file-1")
    (root / "d1/to-dir").symlink_to("../d2")
    (root / "d1/broken").symlink_to("nowhere")
    os.utime(root / "d1/broken", ns=(0, 5_000_000_007), follow_symlinks=False)
    (root / "empty").mkdir()
    for directory in [*root.glob("d*/deep"), *root.glob("*"), root]:
        if directory.is_dir():
            directory.chmod(0o751)
            os.utime(directory, ns=(0, 77_000_000_001))


def describe(root: Path) -> dict[str, tuple[object, ...]]:
    """All that a copy keeps, by path."""
    found = {}
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = None if path.is_symlink() else stat.S_IMODE(info.st_mode)
        found[str(path.relative_to(root))] = (stat.S_IFMT(info.st_mode), mode, info.st_mtime_ns, content)
    return found


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o6777) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, target, mode
    if "\0" in name:
        made.pax_headers = {"path": name}
    return made


def archive(entries: Iterable[tarfile.TarInfo], contents: Mapping[str, bytes] | None = None) -> bytes:
    """As Python's own module writes it. Every file says EVIL, unless `contents` has another."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as made:
        for each in entries:
            data = (contents or {}).get(each.name, b"EVIL") if each.isreg() else b""
            each.size = len(data)
            made.addfile(each, io.BytesIO(data))
    return output.getvalue()
