"""What a merge does: the files of a child onto its parent, and where both have changed. Pure.

Who has changed a path since the fork is known for sure when the moment of the fork can be looked at: the snapshot that
both come from (`base`). A file that neither has touched since still has its inode and its ctime. Without it, what
counts is whether a ctime is later than the fork. Clocks are not trusted further than they can be: what may have been
changed counts as changed, so that a doubt becomes a conflict and no change is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from forkd.client.written import Change, Changes, Clocks, Difference, Facts, compare, is_same, parents_of

# The kernel stamps files with the time of its last tick.
GRAIN_NS = 10_000_000
MAX_STEPS = 100
CARRIED = ("file", "dir", "symlink")


@dataclass(frozen=True)
class MergeConflict:
    path: str
    why: str
    # The child may never have had it: it is kept also by force.
    kept: bool = False


@dataclass(frozen=True)
class MergePlan:
    """`write` and `remove` are of the parent; what is removed comes before what is written."""

    write: tuple[Difference, ...]
    remove: tuple[Difference, ...]
    conflicts: tuple[MergeConflict, ...] = ()
    skipped: tuple[MergeConflict, ...] = ()  # devices, FIFOs and sockets

    @property
    def empty(self) -> bool:
        return not self.write and not self.remove


@dataclass(frozen=True)
class Touch:
    """Whether one side has touched a path since the fork. `doubt`: it has nothing there, and may never have had."""

    touched: bool
    doubt: bool = False


class SinceBase:
    """By comparison with the moment of the fork itself."""

    def __init__(self, base: Changes) -> None:
        self._base = base
        clocks = base.clocks
        self._own_ns = min(clocks.began_ns, clocks.born_ns) - GRAIN_NS

    def look(self, side: Changes, path: str) -> Touch:
        now, then = side.entries.get(path), self._base.entries.get(path)
        if now is None and then is None:
            cut, was = side.cut_by(path), self._base.cut_by(path)
            return Touch((cut is None) != (was is None))
        if then is not None and then.ctime_ns > self._own_ns and not _is_directory(then):
            return Touch(True)  # a program wrote it while we looked: nobody knows what it was
        if now is not None and then is not None:
            return Touch(not _is_untouched(now, then))
        known = now or then
        assert known is not None
        here, there = side.state(path, known.base), self._base.state(path, known.base)
        # A directory is also written when something in it is.
        directories = here is not None and there is not None and here.type == there.type == "dir"
        return Touch(not is_same(here, there) if directories else here is not there)


class SinceTime:
    """By ctimes later than `since_ns`, on the clock of the side that is looked at."""

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns

    def look(self, side: Changes, path: str) -> Touch:
        entry = side.entries.get(path) or side.cut_by(path)
        if entry is not None:
            return Touch(self._is_later(entry))
        # It may have been there, and be gone without a trace but in its directory.
        for above in (*parents_of(path), "/"):
            directory = side.entries.get(above)
            if directory is not None:
                return Touch(self._is_later(directory), doubt=True)
        return Touch(False)

    def _is_later(self, entry: Change) -> bool:
        return entry.ctime_ns > self._since_ns


def find_instants(parent: Clocks, child: Clocks, forked_at_ns: int) -> tuple[int, int]:
    """The last moments on the clocks of parent and child that are before the fork for sure.

    `forked_at_ns` is on the host's clock. The child's `began_ns` is on the parent's clock, and a little after the fork.
    """
    at_ns = forked_at_ns + parent.now_ns - parent.host_after_ns
    lowest_ns = min(at_ns, child.began_ns)
    for set_to_ns, by_ns in reversed(parent.steps):
        if set_to_ns <= at_ns:
            break
        at_ns -= by_ns
        lowest_ns = min(lowest_ns, at_ns, set_to_ns)
    if len(parent.steps) >= MAX_STEPS:
        lowest_ns = 0
    born_ns = min([child.born_ns, *(set_to_ns for set_to_ns, _ in child.steps)])
    return lowest_ns - GRAIN_NS, min(lowest_ns, born_ns) - GRAIN_NS


def plan_merge(
    child: Changes,
    parent: Changes,
    of_child: SinceBase | SinceTime,
    of_parent: SinceBase | SinceTime,
    *,
    force: bool = False,
) -> MergePlan:
    """Contents must have been compared where sizes are the same: what is undecided counts as different."""
    write, remove, conflicts, skipped = [], [], [], []
    for each in compare(parent, child).differences:
        theirs, ours = of_child.look(child, each.path), of_parent.look(parent, each.path)
        if ours.touched and not theirs.touched:
            continue
        if ours.touched == theirs.touched:
            found = MergeConflict(each.path, _explain(each, theirs, ours), kept=theirs.doubt)
            conflicts.append(found)
            if not force or found.kept:
                continue
        if each.after is None:
            remove.append(each)
        elif each.after.type not in CARRIED:
            skipped.append(MergeConflict(each.path, f"it is a {each.after.type}"))
        else:
            write.append(each)
    return MergePlan(tuple(write), tuple(remove), tuple(conflicts), tuple(skipped))


def find_first_removals(plan: MergePlan) -> list[str]:
    """What has to be out of the way: what was removed, without what is in it, and what becomes something else."""
    gone = {each.path for each in plan.remove}
    gone |= {each.path for each in plan.write if each.before is not None and not _fits(each.before, each.after)}
    return sorted(path for path in gone if not any(above in gone for above in parents_of(path)))


def _fits(before: Facts, after: Facts | None) -> bool:
    """Whether an archive replaces one by the other."""
    kinds = {before.type, after.type if after is not None else ""}
    return kinds == {"dir"} or kinds <= {"file", "symlink"}


def _explain(each: Difference, theirs: Touch, ours: Touch) -> str:
    if theirs.doubt:
        return "the parent has written it since the fork, and the child may have removed it"
    if ours.doubt:
        return "the child has written it since the fork, and the parent may have removed it"
    if not theirs.touched:
        return "they differ, and it is not known which of them changed it"
    if each.before is None:
        return "changed in the child, removed in the parent"
    if each.after is None:
        return "removed in the child, changed in the parent"
    if (each.before.type == "dir") != (each.after.type == "dir"):
        words = {True: "a directory", False: "a file"}
        return f"{words[each.after.type == 'dir']} in the child, {words[each.before.type == 'dir']} in the parent"
    return "changed in both"


def _is_untouched(now: Change, then: Change) -> bool:
    if now.file is None or then.file is None:
        return now.file is then.file  # the kernel may use one inode for all that was removed
    if _is_directory(now) and _is_directory(then):
        return is_same(now.file, then.file) is True  # its ctime is about what is in it
    return (now.ino, now.ctime_ns) == (then.ino, then.ctime_ns)


def _is_directory(entry: Change) -> bool:
    return entry.file is not None and entry.file.type == "dir"
