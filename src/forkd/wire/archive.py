"""Directories as tar streams, both ways. Client and guest use this file: what one packs the other unpacks.

Whoever unpacks does not trust the archive. Nothing is written outside the target or through a link: every directory is
opened below the one before it, without following links. Owners and set-id bits are not kept.

Standard library only, Python 3.8: the image builder copies this file into the guest.
"""

from __future__ import annotations

import errno
import os
import stat

from forkd.wire.tar import END, MAX_NAME_BYTES, Entry, Reader, TarError, padding, render_entry, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import AbstractSet, Iterable, Iterator, List, NoReturn, Tuple

# No tree that somebody made on purpose is deeper, or has more.
MAX_DEPTH = 100
MAX_ENTRIES = 1_000_000
# Of those that are left out, how many are named.
MAX_SKIPPED = 1000
PIECE_BYTES = 64 * 1024

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
_WHAT = {"fifo": "a fifo", "socket": "a socket", "char": "a char device", "block": "a block device"}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Exceeded(Exception):
    """More, or deeper, than is copied. The message is a sentence."""


class Torn(Exception):
    """A file became unreadable half-way: what was made of it is not an archive. The cause is an OSError."""


def pack(root: str, without: AbstractSet[int] = frozenset()) -> Iterator[bytes]:
    """An archive of what is in a directory, depth first, in pieces of any size. What vanishes meanwhile is left out.

    Directories of the file systems `without`, by number, are packed empty.
    """
    yield render_entry(_entry_of(".", os.stat(root)))
    under_way: List[Tuple[str, Iterator[os.DirEntry[str]]]] = [("", _list(root))]
    while under_way:
        prefix, entries = under_way[-1]
        found = next(entries, None)
        if found is None:
            under_way.pop()
            continue
        name = prefix + found.name
        try:
            info = found.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                yield from _pack_file(found.path, name)
            elif stat.S_ISLNK(info.st_mode):
                yield render_entry(_entry_of(name, info, os.readlink(found.path)))
            else:
                enter = stat.S_ISDIR(info.st_mode) and info.st_dev not in without
                below = _list(found.path) if enter else None
                yield render_entry(_entry_of(name, info))
                if below is not None:
                    _check_depth(found.path, len(under_way))
                    under_way.append((name + "/", below))
        except FileNotFoundError:
            continue
    yield END


def gather(pieces: Iterable[bytes], size: int = 4 * PIECE_BYTES) -> Iterator[bytes]:
    """The same in pieces of about one size: each is a write, and a message on the way."""
    held: List[bytes] = []
    held_bytes = 0
    for piece in pieces:
        held.append(piece)
        held_bytes += len(piece)
        if held_bytes >= size:
            yield b"".join(held)
            held.clear()
            held_bytes = 0
    yield b"".join(held)


def _list(path: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return iter(sorted(found, key=lambda entry: entry.name))


def _entry_of(name: str, info: os.stat_result, target: str = "") -> Entry:
    kind = _KINDS[stat.S_IFMT(info.st_mode)]
    return Entry(name, kind, info.st_mode & 0o777, info.st_mtime_ns, info.st_size if kind == "file" else 0, target)


def _pack_file(path: str, name: str) -> Iterator[bytes]:
    fd = os.open(path, _READ)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return  # replaced since the directory was read
        yield render_entry(_entry_of(name, info))
        left = info.st_size
        while left:
            data = _read(fd, min(left, PIECE_BYTES), path)
            left -= len(data)
            yield data
        yield padding(info.st_size)
    finally:
        os.close(fd)


def _read(fd: int, size: int, path: str) -> bytes:
    try:
        data = os.read(fd, size)
        if not data:
            raise OSError(errno.EIO, "It became shorter while it was copied")
    except OSError as error:
        error.filename = path
        raise Torn(path) from error
    return data


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Exceeded("%s is %d directories deep" % (path, depth))


class _Level:
    """A directory on the way to the last entry. One that we made gets its mode and time when we leave it."""

    __slots__ = ("fd", "made", "made_of", "name")

    def __init__(self, name: str, fd: int, made: bool, made_of: Entry | None) -> None:
        self.name = name
        self.fd = fd
        self.made = made
        self.made_of = made_of

    def leave(self, keep: bool) -> None:
        try:
            if self.made_of is not None and keep:
                _set_owner(self.fd, self.made_of)
            if self.made_of is not None and self.made:
                if not keep:
                    os.fchmod(self.fd, self.made_of.mode & 0o777)
                _set_time(self.fd, self.made_of)
        finally:
            os.close(self.fd)


class Unpacker:
    """Takes an archive as it arrives, and writes it below a directory. A file gets its name when it is complete.

    Files and links of the same name are replaced, directories are filled. `follow`: links that are there may lead to
    directories, and those in the archive anywhere. Without it none is followed, and one that leads out is left out.
    `keep`: what is written gets owners and set-id bits too, directories that are there their mode, and no link that is
    there is followed.
    An OSError has the name of the entry as its `filename`.
    """

    def __init__(
        self,
        root: str,
        *,
        follow: bool = False,
        made: bool = False,
        max_bytes: int | None = None,
        keep: bool = False,
    ) -> None:
        """`made`: the directory is new, and gets the mode and time of the one that was packed."""
        self.files = 0
        self.bytes = 0
        self.skipped: List[Tuple[str, str]] = []  # name and reason
        self._directory = _DIRECTORY if follow and not keep else _DIRECTORY | os.O_NOFOLLOW
        self._keep = keep
        self._follow = follow
        self._max_bytes = max_bytes
        self._reader = Reader()
        self._entries = 0
        self._name = "."
        # The file that is being written: it has a temporary name until it is complete.
        self._file = -1
        self._entry: Entry | None = None
        self._final = ""
        self._temporary = ""
        self._temporary_name = ".forkd-" + os.urandom(8).hex()
        self._levels = [_Level("", os.open(root, _DIRECTORY), made, None)]

    def feed(self, data: bytes) -> None:
        try:
            for event in self._reader.feed(data):
                if isinstance(event, Entry):
                    self._begin(event)
                elif event is not None:
                    self._write(event)
                else:
                    self._complete()
        except OSError as error:
            error.filename, error.filename2 = self._name, None
            raise

    def finish(self) -> None:
        """All of it has arrived."""
        if not self._reader.ended:
            raise TarError("no end")
        self._leave(0)

    def close(self) -> None:
        """Also after a failure: nothing unfinished stays."""
        self._drop_temporary()
        for level in self._levels:
            os.close(level.fd)
        self._levels.clear()

    def _begin(self, entry: Entry) -> None:
        self._name = entry.name
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise Exceeded("There are more than %d files" % MAX_ENTRIES)
        parts = parse_name(entry.name)
        if len(parts) > MAX_DEPTH:
            _check_depth(entry.name, len(parts) - 1)
        if not parts:
            if entry.kind != "dir":
                _refuse_name(entry.name)
            self._levels[0].made_of = entry
            return
        if entry.kind == "hard link":
            raise TarError("a hard link, %s; make it with --hard-dereference" % shown(entry.name))
        if entry.kind in _WHAT:
            self._skip("it is " + _WHAT[entry.kind])
            return
        self._enter(parts[:-1])
        if entry.kind == "dir":
            self._enter_one(parts[-1], entry)
        elif entry.kind == "symlink":
            self._link(parts, entry)
        else:
            self._open(parts[-1], entry)

    def _skip(self, why: str) -> None:
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append((self._name, why))

    # Directories

    def _enter(self, parts: List[str]) -> None:
        """Open the directory, starting from where we are."""
        same = 0
        while same < len(parts) and same + 1 < len(self._levels) and self._levels[same + 1].name == parts[same]:
            same += 1
        self._leave(same + 1)
        for name in parts[same:]:
            self._enter_one(name, None)

    def _enter_one(self, name: str, entry: Entry | None) -> None:
        """Of an archive that names a file before its directory, the directory has no entry yet."""
        above = self._levels[-1].fd
        made = False
        try:
            # Ours alone until it is complete: its mode is set when we leave it.
            os.mkdir(name, 0o755 if entry is None else 0o700, dir_fd=above)
            made = True
        except FileExistsError:
            pass
        fd = os.open(name, self._directory, dir_fd=above)
        self._levels.append(_Level(name, fd, made, entry))

    def _leave(self, depth: int) -> None:
        while len(self._levels) > depth:
            self._levels.pop().leave(self._keep)

    # Files and links

    def _open(self, name: str, entry: Entry) -> None:
        self._reserve(name)
        self._file = os.open(self._temporary, _CREATE, 0o600, dir_fd=self._levels[-1].fd)
        self._entry = entry

    def _write(self, data: bytes) -> None:
        self.bytes += len(data)
        if self._max_bytes is not None and self.bytes > self._max_bytes:
            raise Exceeded("There are more than %d bytes" % self._max_bytes)
        written = os.write(self._file, data)
        while written < len(data):
            written += os.write(self._file, data[written:])

    def _complete(self) -> None:
        entry, fd = self._entry, self._file
        assert entry is not None
        if self._keep:
            _set_owner(fd, entry)
        else:
            # Never set-id: who packs must not choose as whom it runs here.
            os.fchmod(fd, entry.mode & 0o777)
        _set_time(fd, entry)
        self._file = -1
        os.close(fd)
        self._put_in_place()
        self.files += 1

    def _link(self, parts: List[str], entry: Entry) -> None:
        if not entry.target or "\0" in entry.target or len(entry.target) > MAX_NAME_BYTES:
            raise TarError("a link that leads nowhere: %s" % shown(entry.name))
        if not self._follow and leads_out(entry.target, len(parts) - 1):
            self._skip("it is a symlink that leads out of the copy")
            return
        self._reserve(parts[-1])
        above = self._levels[-1].fd
        os.symlink(entry.target, self._temporary, dir_fd=above)
        times = (entry.mtime_ns, entry.mtime_ns)
        if self._keep:
            os.chown(self._temporary, entry.uid, entry.gid, dir_fd=above, follow_symlinks=False)
        os.utime(self._temporary, ns=times, dir_fd=above, follow_symlinks=False)
        self._put_in_place()

    def _reserve(self, name: str) -> None:
        if not self._levels[-1].made:
            self._check_free(name)
        self._final = name
        self._temporary = self._temporary_name

    def _check_free(self, name: str) -> None:
        """In a directory that we made there are only files, links and directories; a directory is not replaced."""
        try:
            there = os.stat(name, dir_fd=self._levels[-1].fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
            raise FileExistsError(errno.EEXIST, "It is there already, and is not a file")

    def _put_in_place(self) -> None:
        above = self._levels[-1].fd
        os.rename(self._temporary, self._final, src_dir_fd=above, dst_dir_fd=above)
        self._temporary = ""
        self._entry = None

    def _drop_temporary(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._temporary and self._levels:
            try:
                os.unlink(self._temporary, dir_fd=self._levels[-1].fd)
            except OSError:
                pass
            self._temporary = ""


def parse_name(name: str) -> List[str]:
    """The steps down from the root; none for the root itself. Never up, never elsewhere."""
    if not name or name[0] == "/" or "\0" in name or len(name) > MAX_NAME_BYTES:
        _refuse_name(name)
    parts = name.split("/")
    if "" in parts or "." in parts:
        parts = [part for part in parts if part not in ("", ".")]
    if ".." in parts:
        _refuse_name(name)
    return parts


def leads_out(target: str, depth: int) -> bool:
    """Whether a link so many directories down might lead out.

    Up is only allowed at the beginning. After a name, which may itself be a link, nobody can tell where up leads.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return target.startswith("/") or ups > depth or ".." in parts[ups:]


def _refuse_name(name: str) -> NoReturn:
    raise TarError("a file name that is not valid: %s" % shown(name))


def _set_owner(fd: int, entry: Entry) -> None:
    """And the mode, which a change of the owner would take bits from."""
    os.fchown(fd, entry.uid, entry.gid)
    os.fchmod(fd, entry.mode)


def _set_time(fd: int, entry: Entry) -> None:
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
