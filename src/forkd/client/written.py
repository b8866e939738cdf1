"""What sandboxes have written over their image, and how two of them differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forkd.errors import ProtocolError

Kind = Literal["added", "removed", "changed"]

# What two forks write right after the fork can get the same inode and, before the clock's first tick, the same time.
_RECENT_NS = 5 * 10**9


@dataclass(frozen=True)
class Facts:
    """A file, directory, link or other thing at a path. `sha256` is there when it was asked for."""

    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Change:
    """One path that was written. `file` is None when it was removed, `base` when the image has nothing there."""

    path: str
    ctime_ns: int
    ino: int
    file: Facts | None
    base: Facts | None

    @property
    def removed(self) -> bool:
        return self.file is None


@dataclass(frozen=True)
class Clocks:
    """docs/reference/rest.md says what each is."""

    now_ns: int = 0
    host_before_ns: int = 0
    host_after_ns: int = 0
    began_ns: int = 0
    born_ns: int = 0
    steps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Changes:
    """All that a sandbox has written over `image`, by path."""

    image: str
    clocks: Clocks
    entries: Mapping[str, Change] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def state(self, path: str, base: Facts | None) -> Facts | None:
        """What is at a path where the image has `base`."""
        entry = self.entries.get(path)
        if entry is not None:
            return entry.file
        return base if self.cut_by(path) is None else None

    def cut_by(self, path: str) -> Change | None:
        """The directory above it that was removed, or is none any more."""
        for above in parents_of(path):
            entry = self.entries.get(above)
            if entry is not None and (entry.file is None or entry.file.type != "dir"):
                return entry
        return None


@dataclass(frozen=True)
class Difference:
    """From `before` to `after`; None where there is nothing."""

    path: str
    before: Facts | None
    after: Facts | None

    @property
    def kind(self) -> Kind:
        return "added" if self.before is None else "removed" if self.after is None else "changed"


@dataclass(frozen=True)
class Comparison:
    """`undecided` are files of the same size whose contents were not compared; they are differences too."""

    differences: tuple[Difference, ...]
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Two sandboxes, or snapshots as they are when forked."""

    before: Changes
    after: Changes
    comparison: Comparison

    @property
    def differences(self) -> tuple[Difference, ...]:
        return self.comparison.differences


def parents_of(path: str) -> Iterator[str]:
    """The directories above it, the nearest first, without the root."""
    while (path := path.rpartition("/")[0]) != "":
        yield path


def compare(before: Changes, after: Changes) -> Comparison:
    """Times are not compared, nor the sizes of directories."""
    differences, undecided = [], []
    long_ago_ns = min(before.clocks.began_ns, after.clocks.began_ns) - _RECENT_NS
    for path in sorted(before.entries.keys() | after.entries.keys()):
        old, new = before.entries.get(path), after.entries.get(path)
        if old is not None and new is not None and old.ctime_ns <= long_ago_ns and _is_same_inode(old, new):
            continue
        known = new if old is None else old
        base = None if known is None else known.base
        was, now = before.state(path, _hashed(base, old, new)), after.state(path, _hashed(base, old, new))
        same = is_same(was, now)
        if same is None:
            undecided.append(path)
        if not same:
            differences.append(Difference(path, was, now))
    return Comparison(tuple(differences), tuple(undecided))


def _is_same_inode(old: Change, new: Change) -> bool:
    """Untouched since both were one."""
    return (old.ino, old.ctime_ns) == (new.ino, new.ctime_ns) and _without_sum(old.file) == _without_sum(new.file)


def _hashed(base: Facts | None, *entries: Change | None) -> Facts | None:
    """Of the image's file, with its digest if one of the two knows it."""
    for entry in entries:
        if base is not None and base.sha256 is None and entry is not None and entry.base is not None:
            base = entry.base
    return base


def _without_sum(facts: Facts | None) -> Facts | None:
    return None if facts is None else replace(facts, sha256=None)


def is_same(one: Facts | None, other: Facts | None) -> bool | None:
    """None: they may be, but nobody has looked at the contents."""
    if one is None or other is None:
        return one is other
    if (one.type, one.mode, one.uid, one.gid) != (other.type, other.mode, other.uid, other.gid):
        return False
    if one.type == "symlink":
        return one.target == other.target
    if one.type != "file":
        return True
    if one.size != other.size:
        return False
    if one is other or one.size == 0:
        return True
    return None if one.sha256 is None or other.sha256 is None else one.sha256 == other.sha256


def add_sums(changes: Changes, sums: Changes) -> Changes:
    """With the digests of `sums`, which was read later, of what has not changed in between."""
    entries = dict(changes.entries)
    for path, entry in sums.entries.items():
        known = entries.get(path)
        if known is not None and (known.ino, known.ctime_ns) == (entry.ino, entry.ctime_ns):
            entries[path] = entry
    return replace(changes, entries=entries)


class ChangesParser:
    """JSON lines of the daemon to Changes."""

    def __init__(self) -> None:
        self._rest = b""
        self._head: dict[str, Any] | None = None
        self._entries: dict[str, Change] = {}
        self._count: int | None = None

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line:
                self._take(json.loads(line))

    def _take(self, value: dict[str, Any]) -> None:
        if self._head is None:
            self._head = value
        elif value.get("end") is True:
            self._count = value["count"]
        else:
            file, base = (None if value[key] is None else Facts(**value[key]) for key in ("file", "base"))
            self._entries[value["path"]] = Change(value["path"], value["ctime_ns"], value["ino"], file, base)

    def finish(self) -> Changes:
        if self._head is None or self._count is None:
            raise ProtocolError("The list of changes was not sent to its end", hint="Ask for it again")
        times = {name: self._head[name] for name in Clocks.__dataclass_fields__}
        times["steps"] = tuple((at, by) for at, by in times["steps"])
        return Changes(self._head["image"], Clocks(**times), self._entries)
