"""How two sets of written files are compared, and what a merge of them does: by value."""

import json
from dataclasses import replace

import pytest

from forkd.client.merge_plan import GRAIN_NS, SinceBase, SinceTime, find_first_removals, find_instants, plan_merge
from forkd.client.written import Change, Changes, ChangesParser, Clocks, Facts, add_sums, compare
from forkd.errors import ProtocolError

FORK = 1_000_000_000_000
LATER = FORK + 1_000_000_000


def file(text: str = "", **more: object) -> Facts:
    known = Facts("file", len(text), 0o644, 0, 0, 0, sha256=f"sum of {text}")
    return replace(known, **more)  # type: ignore[arg-type]


DIR = Facts("dir", 0, 0o755, 0, 0, 0)
LINK = Facts("symlink", 1, 0o777, 0, 0, 0, target="x")
PIPE = Facts("fifo", 0, 0o644, 0, 0, 0)


def written(**entries: Facts | Change | None) -> Changes:
    """Names have _ for /; what is no Change was written before the fork, over nothing."""
    made = {}
    for name, each in entries.items():
        path = "/" + name.replace("_", "/").strip("/")
        change = each if isinstance(each, Change) else old(each)
        made[path] = replace(change, path=path)
    return Changes("image", Clocks(began_ns=FORK + 50_000_000, born_ns=FORK + 90_000_000), made)


def old(facts: Facts | None, base: Facts | None = None, ino: int = 1) -> Change:
    return Change("", FORK - 10**10, ino, facts, base)


def new(facts: Facts | None, base: Facts | None = None, ino: int = 2) -> Change:
    return Change("", LATER, ino, facts, base)


def kinds(before: Changes, after: Changes) -> dict[str, str]:
    return {each.path: each.kind for each in compare(before, after).differences}


def test_only_what_differs_is_a_difference() -> None:
    before = written(same=file("a"), gone=file("a"), other=new(file("a")), mode=file("a"), link=LINK, d=DIR)
    after = written(
        same=new(file("a", mtime_ns=7)),
        come=file("a"),
        other=new(file("b")),
        mode=new(file("a", mode=0o600)),
        link=new(replace(LINK, target="y")),
        d=new(DIR),
    )
    assert kinds(before, after) == {
        "/come": "added",
        "/gone": "removed",
        "/link": "changed",
        "/mode": "changed",
        "/other": "changed",
    }
    assert kinds(after, after) == {}


def test_what_one_has_not_written_is_as_the_image_has_it() -> None:
    image = file("image")
    assert kinds(written(), written(f=new(file("image"), base=image))) == {}
    assert kinds(written(), written(f=new(file("other"), base=image))) == {"/f": "changed"}
    assert kinds(written(), written(f=new(None, base=image))) == {"/f": "removed"}
    assert kinds(written(f=new(None, base=image)), written()) == {"/f": "added"}
    # Of a directory that is gone, nothing is there, whatever the image has.
    assert kinds(written(d=new(None, DIR)), written(d_f=new(file("x"), image))) == {"/d": "added", "/d/f": "added"}
    assert kinds(written(d=new(LINK, DIR)), written(d_f=new(None, image))) == {"/d": "changed"}


def test_contents_of_the_same_size_are_undecided_until_somebody_looks() -> None:
    bare = file("a", sha256=None)
    one, two = written(f=bare), written(f=new(replace(bare)))
    assert (compare(one, two).undecided, kinds(one, two)) == (("/f",), {"/f": "changed"})
    # The same inode with the same ctime was written before they were two.
    assert compare(one, written(f=replace(bare))).differences == ()
    recent = Change("", FORK, 1, bare, None)
    assert compare(written(f=recent), written(f=replace(recent, file=replace(bare)))).undecided == ("/f",)
    assert compare(written(f=file("", sha256=None)), written(f=new(file("")))).differences == ()
    assert compare(add_sums(one, written(f=file("a"))), add_sums(two, written(f=new(file("a"))))).differences == ()
    # What has changed since it was listed keeps its doubt.
    assert add_sums(two, written(f=Change("", LATER + 1, 2, file("b"), None))) == two


def test_a_merge_with_the_moment_of_the_fork_at_hand_is_exact() -> None:
    base = written(kept=file("k"), dropped=file("d"), edited=file("e"), theirs=file("t"), both=file("b"), dir=DIR)
    child = written(
        kept=file("k"),
        edited=new(file("edit")),
        theirs=file("t"),
        both=new(file("child")),
        dir=new(DIR),
        dir_new=new(file("n")),
        link=new(LINK),
        pipe=new(PIPE),
    )
    parent = written(
        kept=file("k"),
        dropped=file("d"),
        edited=file("e"),
        theirs=new(file("parent"), ino=3),
        both=new(file("PARENT"), ino=3),
        dir=new(DIR),
        dir_other=new(file("o"), ino=4),
        own=new(file("own"), ino=5),
    )
    since = SinceBase(base)
    plan = plan_merge(child, parent, since, since)
    assert [each.path for each in plan.write] == ["/dir/new", "/edited", "/link"]
    assert [each.path for each in plan.remove] == ["/dropped"]
    assert [(each.path, each.why) for each in plan.conflicts] == [("/both", "changed in both")]
    assert [each.path for each in plan.skipped] == ["/pipe"]
    forced = plan_merge(child, parent, since, since, force=True)
    assert [each.path for each in forced.write] == ["/both", "/dir/new", "/edited", "/link"]
    assert not plan.empty and plan_merge(child, child, since, since).empty


@pytest.mark.parametrize(
    ("child", "parent", "why"),
    [
        (written(f=new(file("c"))), written(), "changed in the child, removed in the parent"),
        (written(), written(f=new(file("p"))), "removed in the child, changed in the parent"),
        (written(f=new(DIR)), written(f=new(file("p"), ino=3)), "a directory in the child, a file in the parent"),
        (written(f=new(file("c"))), written(f=new(DIR, ino=3)), "a file in the child, a directory in the parent"),
        (written(f=new(file("c"))), written(f=new(file("p"), ino=3)), "changed in both"),
    ],
)
def test_every_kind_of_conflict_is_named(child: Changes, parent: Changes, why: str) -> None:
    since = SinceBase(written(f=file("base")))
    plan = plan_merge(child, parent, since, since)
    assert ([each.why for each in plan.conflicts], plan.empty) == ([why], True)
    assert not plan_merge(child, parent, since, since, force=True).empty


def test_a_removed_directory_is_in_conflict_with_what_was_changed_in_it() -> None:
    base = written(d=DIR, d_f=file("f"), d_g=file("g"))
    since = SinceBase(base)
    removed, changed = written(), written(d=new(DIR), d_f=new(file("F")), d_g=file("g"))
    plan = plan_merge(removed, changed, since, since)
    assert [each.path for each in plan.conflicts] == ["/d/f"]
    assert find_first_removals(plan_merge(removed, changed, since, since, force=True)) == ["/d"]
    assert [each.path for each in plan_merge(changed, removed, since, since).conflicts] == ["/d/f"]
    # Of the image's directories the same, by the mark of their removal.
    gone, inside = written(d=new(None, DIR)), written(d=new(DIR, DIR), d_f=new(file("F"), file("f")))
    nothing = SinceBase(written())
    assert [each.path for each in plan_merge(gone, inside, nothing, nothing).conflicts] == ["/d/f"]
    assert [each.path for each in plan_merge(inside, gone, nothing, nothing).conflicts] == ["/d/f"]


def test_what_was_written_while_somebody_looked_at_the_fork_is_a_conflict() -> None:
    base = replace(written(log=new(file("base"), ino=1)), clocks=Clocks(began_ns=FORK, born_ns=FORK))
    since = SinceBase(base)
    plan = plan_merge(written(log=new(file("c"))), written(log=old(file("p"))), since, since)
    assert [each.path for each in plan.conflicts] == ["/log"]


def test_without_that_moment_ctimes_decide_and_a_doubt_is_a_conflict() -> None:
    since = SinceTime(FORK)
    child = written(
        _=new(DIR), edited=new(file("c")), d=new(DIR), d_new=new(file("n")), both=new(file("c")), theirs=file("t")
    )
    parent = written(
        _=DIR, edited=file("p"), d=DIR, both=new(file("p"), ino=3), theirs=new(file("p"), ino=4), dropped=file("d")
    )
    plan = plan_merge(child, parent, since, since)
    assert [each.path for each in plan.write] == ["/d/new", "/edited"]
    assert [each.path for each in plan.conflicts] == ["/both"]
    # There was something at the fork that the child does not have: it has removed it.
    assert [each.path for each in plan.remove] == ["/dropped"]
    # The parent's directory has changed since: who knows whether the file was in it.
    busy = replace(parent, entries={**parent.entries, "/d": replace(new(DIR), path="/d")})
    assert [each.path for each in plan_merge(child, busy, since, since).conflicts] == ["/both", "/d/new"]
    # The parent has something new where the child may have removed it: by force it is not lost either.
    fresh = written(d=DIR, d_fresh=new(file("f")))
    worked = written(d=new(DIR))
    plan = plan_merge(worked, fresh, since, since, force=True)
    assert ([(each.path, each.kept) for each in plan.conflicts], plan.empty) == ([("/d/fresh", True)], True)
    untouched = written(d=DIR)
    assert plan_merge(untouched, fresh, since, since) == plan_merge(untouched, untouched, since, since)


def test_the_instant_of_the_fork_is_never_too_late() -> None:
    """The host forked at FORK; the parent's clock is 5 s ahead of the host's, and an answer took 2 ms."""
    ahead = 5 * 10**9
    parent = Clocks(now_ns=LATER + ahead + 10**6, host_before_ns=LATER, host_after_ns=LATER + 2 * 10**6)
    child = Clocks(began_ns=FORK + ahead + 30 * 10**6, born_ns=FORK + 60 * 10**6)
    of_parent, of_child = find_instants(parent, child, FORK)
    assert of_parent == FORK + ahead - 10**6 - GRAIN_NS
    assert of_child == child.born_ns - GRAIN_NS  # its clock went back to the host's
    # A clock that was set after the fork: the instant is on the clock as it was then.
    stepped = replace(parent, now_ns=LATER, steps=((FORK + 10**8, -ahead),))
    assert find_instants(stepped, child, FORK)[0] == FORK - 2 * 10**6 - GRAIN_NS
    behind = replace(parent, now_ns=LATER, steps=((FORK + 10**8, 10**9),))
    assert find_instants(behind, child, FORK)[0] <= FORK - 10**9
    # A user set it, and nobody knows when: what the child remembers counts.
    jumped = replace(parent, now_ns=LATER + 10**15)
    assert find_instants(jumped, child, FORK)[0] == child.began_ns - GRAIN_NS
    assert find_instants(replace(parent, steps=((1, 1),) * 100), child, FORK)[0] < 0


def test_what_must_be_out_of_the_way_is_removed_first() -> None:
    since = SinceBase(written(a=DIR, a_b=file("b"), c=file("c"), f=file("f"), l=LINK))
    child = written(a=new(file("now a file")), c=new(DIR), c_d=new(file("d")), f=new(LINK), l=new(file("l")))
    parent = written(a=DIR, a_b=file("b"), c=file("c"), f=file("f"), l=LINK)
    plan = plan_merge(child, parent, since, since)
    assert plan.conflicts == ()
    assert find_first_removals(plan) == ["/a", "/c"]  # an archive replaces files by links, and the other way


def test_a_list_that_was_cut_short_is_not_taken_for_whole() -> None:
    times = dict.fromkeys(("now_ns", "host_before_ns", "host_after_ns", "began_ns", "born_ns"), 1)
    head = json.dumps({"image": "x", **times, "steps": []}).encode()
    parser = ChangesParser()
    parser.feed(head + b"\n\n")
    with pytest.raises(ProtocolError, match="to its end"):
        parser.finish()
    parser.feed(b'{"end": true, "cou')
    parser.feed(b'nt": 0}\n')
    assert len(parser.finish()) == 0
