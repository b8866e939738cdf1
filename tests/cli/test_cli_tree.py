"""`forkd tree`, as a value: who is below whom, and how that is drawn."""

from typing import Any

import pytest

from forkd.cli import tree
from forkd.cli.output import measure, render_table
from forkd.cli.tree import Node, build_trees, render_rows, render_summary
from forkd.wire.api import Lineage

LINES = ("+ ", "` ", "| ", "  ")
MIB = 1 << 20


def sandbox(sandbox_id: str, tag: str = "base", parent: str | None = None, **more: Any) -> Any:
    info = {"id": sandbox_id, "name": None, "snapshot_tag": tag, "parent_id": parent, "state": "running"}
    info |= {"created_at_unix": 0, "deadline_unix": None, "on_timeout": "kill", "workspace": None, "cause": None}
    return info | more


def snapshot(tag: str, parent: str | None = None, *sandboxes: Any, **more: Any) -> Any:
    info = {"tag": tag, "parent_tag": parent, "branched_from": None, "checkpoint": None, "auto": False}
    info |= {"status": "ready", "created_at_unix": 0, "depth": 0, "unique_bytes": MIB, "sandboxes": list(sandboxes)}
    return info | more


def lineage(*snapshots: Any, orphans: tuple[Any, ...] = ()) -> Lineage:
    return {"snapshots": list(snapshots), "orphans": list(orphans)}


def names(nodes: list[Node]) -> list[Any]:
    """Each node as its name, with what is below it behind it."""
    found: list[Any] = []
    for node in nodes:
        name = node.sandbox["id"] if node.sandbox else node.snapshot["tag"] if node.snapshot else "gone"
        found += [name, names(node.below)] if node.below else [name]
    return found


def test_every_snapshot_is_there_once_whatever_their_parents_are() -> None:
    given = lineage(snapshot("a"), snapshot("b", "a"), snapshot("c", "b"), snapshot("d", "lost"), snapshot("e", "e"))
    assert names(build_trees(given)) == ["a", ["b", ["c"]], "d", "e"]
    circle = lineage(snapshot("a", "c"), snapshot("b", "a"), snapshot("c", "b"))
    assert sorted(str(names(build_trees(circle))).replace("[", "").replace("]", "").split(", ")) == [
        "'a'",
        "'b'",
        "'c'",
    ]


def test_a_fork_of_a_sandbox_is_below_it_and_else_below_its_snapshot() -> None:
    forks = (sandbox("two", "branch-1", "one"), sandbox("three", "branch-1", "two"), sandbox("four", "base", "ended"))
    given = lineage(snapshot("base", None, sandbox("one")), orphans=forks)
    assert names(build_trees(given)) == ["base", ["one", ["two", ["three"]], "four"]]


def test_a_sandbox_of_which_nothing_is_left_is_shown_apart() -> None:
    given = lineage(snapshot("base"), orphans=(sandbox("one", "lost", "ended"),))
    assert names(build_trees(given)) == ["base", "gone", ["one"]]


def test_a_checkpoint_is_below_its_sandbox_even_when_that_was_rewound_to_it() -> None:
    point = {"branched_from": "one", "checkpoint": "safe"}
    before = lineage(snapshot("base", None, sandbox("one")), snapshot("cp", "base", **point))
    rewound = lineage(snapshot("base"), snapshot("cp", "base", sandbox("one", "cp"), **point))
    assert names(build_trees(before)) == names(build_trees(rewound)) == ["base", ["one", ["cp"]]]
    ended = lineage(snapshot("base"), snapshot("cp", "base", **point))
    assert names(build_trees(ended)) == ["base", ["cp"]]


def test_a_tree_says_what_each_is_holds_and_came_from() -> None:
    given = lineage(
        snapshot(
            "base",
            None,
            sandbox("one", name="web", unique_bytes=2 * MIB, deadline_unix=90.0),
            sandbox("two", state="dead", cause="it\nended", workspace="mine"),
        ),
        snapshot("later", "base", branched_from="one", status="writing"),
        snapshot("cp", "base", branched_from="one", checkpoint="safe"),
        snapshot("derived", "base", branched_from="ended"),
    )
    rows = [[row[name] for name in tree._HEADINGS] for row in render_rows(build_trees(given), LINES, 60.0)]
    assert rows == [
        ["base", "ready", "1m", "1.0 MiB", ""],
        ["+ one web", "running", "1m", "2.0 MiB", "kill in 30s"],
        ["| ` @safe", "ready", "1m", "1.0 MiB", ""],
        ["+ two", "dead", "1m", "", "workspace mine, it\\nended"],
        ["+ later", "writing", "1m", "", "of web"],
        ["` derived", "ready", "1m", "1.0 MiB", ""],
    ]
    told = "3 snapshots; 1 checkpoint; 2 sandboxes, 1 running; 4.0 MiB on disk; 2.0 MiB in memory"
    assert render_summary(given) == told


def test_a_tree_of_usual_depth_fits_into_80_columns() -> None:
    chain = [snapshot("level-0"), *(snapshot(f"level-{each}", f"level-{each - 1}") for each in range(1, 5))]
    chain[-1]["sandboxes"] = [sandbox("sb-0123456789", "level-4", cause="a long story that is told in full" * 3)]
    rows = [[row[name] for name in tree._HEADINGS] for row in render_rows(build_trees(lineage(*chain)), LINES, 1.0)]
    lines = render_table(tree._HEADINGS, rows, 80, ("NOTE",))
    assert max(map(measure, lines)) <= 80 and sum("sb-0123456789" in line for line in lines) == 1


def test_a_terminal_without_those_characters_gets_a_tree_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree._can_show("├─ ") in (True, False)
    assert all(each.isascii() for each in tree._ASCII)
    assert [len(each) for each in tree._ASCII] == [len(each) for each in tree._LINES]
