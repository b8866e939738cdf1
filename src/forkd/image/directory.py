"""A root file system from a directory of the user's. It is read, never executed; no link leads out of it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed, Conflict, InvalidInput, NotFound
from forkd.host.tools import run_tool, tool_environment
from forkd.host.trees import Descent, descended
from forkd.image.pack import Render
from forkd.image.root import MOUNTED_OVER, Node, get_python
from forkd.image.spec import Progress
from forkd.image.target import directory_target

_PACK_DEADLINE_S = 1800.0
_MAX_ENTRIES = 2_000_000
# What the kernel takes as a path, and with it mkfs.erofs.
_MAX_PATH_BYTES = 4095
_CHUNK = 1 << 20
_KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Scan:
    """A directory as read: a digest of everything that goes into the image, and its names and kinds."""

    digest: str
    tree: dict[str, Node]
    newest_mtime: int


def scan_directory(directory: Path) -> Scan:
    """Digest paths, modes, owners, link targets and content. Raises InvalidInput for what an image cannot hold."""
    return _scan(directory, _Scanner(directory, owners=_keep_owners(), left_out=MOUNTED_OVER))


def scan_copied(source: Path) -> str:
    """The digest of what `--copy` takes: a file's mode and content, or a directory; whose they are does not matter."""
    try:
        real = source.resolve(strict=True)
        is_directory = real.is_dir()
    except FileNotFoundError as error:
        raise NotFound(f"There is no file or directory {source}", hint="Check the source of --copy") from error
    except (OSError, RuntimeError) as error:
        raise InvalidInput(f"{source} cannot be read") from error
    scanner = _Scanner(source, owners=False, left_out=())
    return _scan(source, scanner).digest if is_directory else scanner.digest_file(real)


def _scan(directory: Path, scanner: _Scanner) -> Scan:
    with _opened_root(directory) as descent:
        try:
            return scanner.scan(descent)
        except OSError as error:
            raise InvalidInput(f"{directory} cannot be read: {error}") from error


def build_directory_root(directory: Path, scan: Scan, render: Render, out: Path, progress: Progress) -> dict[str, Any]:
    """Pack a directory just scanned into `out`; returns what is in it."""
    # Extended attributes are not part of the digest, so they stay out.
    pack = render(out, directory, True, not _keep_owners())
    python = get_python(scan.tree)
    progress.stage(f"Packing {directory}")
    run_tool(
        pack,
        doing=f"Packing {directory}",
        failure=BuildFailed,
        deadline_s=_PACK_DEADLINE_S,
        on_line=progress.line,
        env=tool_environment(SOURCE_DATE_EPOCH=str(scan.newest_mtime)),
        disk=out,
    )
    if scan_directory(directory).digest != scan.digest:
        raise changed_meanwhile(directory)
    return {"python": python.path, "target": directory_target(directory, scan.tree, python.minor).as_json()}


def changed_meanwhile(path: Path) -> Conflict:
    return Conflict(f"{path} changed while it was read", hint="Build again when nothing writes to it")


class _Scanner:
    """One walk by descriptors: a path that is swapped for a link meanwhile is an error, not a way out."""

    def __init__(self, directory: Path, *, owners: bool, left_out: Collection[str]) -> None:
        self._directory = directory
        self._owners = owners
        self._left_out = left_out
        self._digest = hashlib.sha256()
        self._tree: dict[str, Node] = {}
        self._newest = 0

    def scan(self, descent: Descent) -> Scan:
        device = os.fstat(descent.fd).st_dev
        # For each directory that we are in: its path, and the names in it that are still to be taken.
        todo = [("", _names(descent.fd))]
        while todo:
            prefix, names = todo[-1]
            if not names:
                todo.pop()
                if todo:
                    descent.leave()
                continue
            name = names.pop()
            path = prefix + name
            if self._take(descent.fd, name, path):
                descent.enter(name)
                if os.fstat(descent.fd).st_dev != device:
                    raise self._refused(path, "is another file system", "Unmount it or copy the directory")
                todo.append((path + "/", _names(descent.fd)))
        return Scan(self._digest.hexdigest(), self._tree, self._newest)

    def _take(self, parent: int, name: str, path: str) -> bool:
        """True for a directory whose entries are to be taken, too."""
        if len(self._tree) >= _MAX_ENTRIES:
            raise InvalidInput(f"{self._directory} has more than {_MAX_ENTRIES} files")
        if len(os.fsencode(f"{self._directory}/{path}")) > _MAX_PATH_BYTES:
            raise self._refused(
                f"{path[:60]}...",
                f"has a path of more than {_MAX_PATH_BYTES} bytes",
                "Use fewer or shorter directories",
            )
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = _KINDS.get(stat.S_IFMT(info.st_mode))
        if kind is None:
            raise self._refused(path, "is a device, socket or pipe", "Remove it; the guest has a /dev of its own")
        target = os.readlink(name, dir_fd=parent) if kind == "l" else ""
        mode = stat.S_IMODE(info.st_mode)
        self._tree[path] = Node(kind, mode, target)
        self._newest = max(self._newest, int(info.st_mtime))
        owner = f"{info.st_uid}:{info.st_gid}" if self._owners else ""
        size = info.st_size if kind == "f" else 0
        self._digest.update(os.fsencode(f"{kind}\0{mode:o}\0{owner}\0{size}\0{path}\0{target}\0"))
        if kind == "f":
            with _opened(name, parent, _OPEN) as fd:
                self._digest_content(fd, path, size)
        return kind == "d" and path not in self._left_out

    def digest_file(self, file: Path) -> str:
        try:
            with _opened(str(file.parent), None, _OPEN | os.O_DIRECTORY) as parent:
                self._take(parent, file.name, "")
        except OSError as error:
            raise InvalidInput(f"{file} cannot be read: {error.strerror}") from error
        return self._digest.hexdigest()

    def _digest_content(self, fd: int, path: str, size: int) -> None:
        left = size
        while data := os.read(fd, _CHUNK):
            left -= len(data)
            self._digest.update(data)
        if left != 0:
            raise Conflict(f"{self._directory}: {path!r} changed while it was read")

    def _refused(self, path: str, why: str, hint: str) -> InvalidInput:
        return InvalidInput(f"In {self._directory}, {path!a} {why}", hint=hint)


def _names(fd: int) -> list[str]:
    """The last one first, to be taken from the end."""
    return sorted(os.listdir(fd), reverse=True)


@contextmanager
def _opened_root(directory: Path) -> Iterator[Descent]:
    with ExitStack() as stack:
        try:
            real = directory.resolve(strict=True)
            descent = stack.enter_context(descended(real))
        except FileNotFoundError as error:
            raise NotFound(f"There is no directory {directory}") from error
        except (OSError, RuntimeError) as error:
            raise InvalidInput(f"{directory} is not a directory that can be read") from error
        if real == Path("/") or os.path.samestat(os.fstat(descent.fd), Path("/").stat()):
            raise InvalidInput("The host's own root cannot become an image", hint="Copy what you need to a directory")
        yield descent


@contextmanager
def _opened(name: str, parent: int | None, flags: int) -> Iterator[int]:
    fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _keep_owners() -> bool:
    """Without root, the files are the caller's own and become root's in the image."""
    return os.geteuid() == 0
