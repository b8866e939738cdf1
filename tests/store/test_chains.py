"""Chains of snapshots: held and verified as a whole, removed without leaving a layer over nothing, whatever crashes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chain_cases import PAGES, SIZE, entries, make_layer, make_root, manifest, noise, read_content, started

from forkd.errors import Conflict, NotFound, SnapshotDamaged
from forkd.host import files
from forkd.host.chunks import CHUNK
from forkd.host.files import sweep_staging
from forkd.model.memory import PAGE
from forkd.model.names import SnapshotTag, parse_tag
from forkd.store import chain
from forkd.store.dependents import find_children, find_subtree, leaves_first
from forkd.store.layers import write_layer
from forkd.store.manifest import Parent
from forkd.store.snapshots import SnapshotStore

ROOT, A, B, C, OTHER = map(parse_tag, ("root", "a", "b", "c", "other"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root, with a over it; b and other over a; c over b."""
    store = SnapshotStore(tmp_path_factory.mktemp("made") / "snapshots")
    make_root(store)
    for number, (tag, parent) in enumerate((("a", "root"), ("b", "a"), ("other", "a"), ("c", "b"))):
        make_layer(store, tag, parent, lambda guest, at=number: guest.write(at * 10 * PAGE, noise(3, 100 + at)))
    return store.root


@pytest.fixture
def store(made: Path, tmp_path: Path) -> SnapshotStore:
    subprocess.run(["cp", "-a", str(made), str(tmp_path / "snapshots")], check=True)
    return SnapshotStore(tmp_path / "snapshots")


def tags(store: SnapshotStore) -> list[str]:
    return [snapshot.manifest.tag for snapshot in store.list().snapshots]


def unusable(store: SnapshotStore) -> dict[str, str]:
    return {entry.tag: entry.error.message for entry in store.list().unusable}


def edit(store: SnapshotStore, tag: str, **fields: object) -> None:
    path = store.root / tag / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_snapshot_knows_what_it_lies_over(store: SnapshotStore) -> None:
    snapshot = store.get(C)
    assert [link.manifest.tag for link in snapshot.ancestors] == ["root", "a", "b"]
    assert [link.depth for link in (*snapshot.ancestors, snapshot)] == [0, 1, 2, 3]
    assert snapshot.root_memory == store.root / "root/memory"
    assert snapshot.memory_bytes == SIZE
    assert [run.start // PAGE for run in snapshot.runs] == [0, 10, 30]
    assert store.get(ROOT).runs == ()
    assert snapshot.ancestors[-1] == store.get(B)
    assert tags(store) == ["a", "b", "c", "other", "root"]
    assert snapshot.chain_bytes() == snapshot.disk_bytes() + store.get(B).chain_bytes()
    assert snapshot.disk_bytes() < store.get(ROOT).disk_bytes()


def test_a_snapshot_of_an_engine_without_memory_has_a_chain_too(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots")
    parent = None
    for tag in (A, B):
        with store.created(tag, replace_existing=False) as (staging, seal):
            (staging / "journal").write_text(tag)
            seal(manifest(tag, parent))
        parent = store.get(tag)
    with store.held(B) as snapshot:
        assert (snapshot.root_memory, snapshot.runs, snapshot.memory_bytes, snapshot.depth) == (None, (), 0, 1)
    flat = store.compact(B, C)
    assert (flat.directory / "journal").read_text() == "b"


def test_what_a_held_layer_lies_over_cannot_be_removed_or_replaced(store: SnapshotStore) -> None:
    with store.held(C):
        for tag in (ROOT, A, B, C):
            for options in ({"cascade": True}, {"force": True}):
                with pytest.raises(Conflict, match="in use"):
                    store.remove(tag, **options)
        store.remove(OTHER)
    assert tags(store) == ["a", "b", "c", "root"]


def test_what_passed_is_not_hashed_again_for_any_layer_over_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.05)  # more than file times are coarse
    with store.held(C):
        pass
    read: list[Path] = []
    real = files.digest_chunks
    monkeypatch.setattr(files, "digest_chunks", lambda path: read.append(path) or real(path))
    with store.held(C), store.held(B):
        pass
    assert read == []
    with store.held(OTHER):
        pass
    assert {path.parent.name for path in read} == {"other"}


def test_a_layer_whose_parent_is_missing_replaced_or_damaged_says_so(store: SnapshotStore) -> None:
    for tag, said in (("b", "b is a layer over a, which is missing"), ("c", "b is a layer over a, which is missing")):
        (store.root / "a").rename(store.root / ".a")
        with pytest.raises(SnapshotDamaged, match=said) as caught, store.held(parse_tag(tag)):
            pytest.fail("handed out")
        assert caught.value.hint == f"Remove it and make it again: forkd snapshot rm {tag}"
        assert set(unusable(store)) == {"b", "c", "other"}
        (store.root / ".a").rename(store.root / "a")
    assert unusable(store) == {}
    good = (store.root / "a/manifest.json").read_bytes()
    edit(store, "a", warm="another")
    assert "b is a layer over a a that was replaced since" in unusable(store)["c"]
    (store.root / "a/manifest.json").write_text("{")
    assert "b is a layer over a, which is damaged" in unusable(store)["c"]
    (store.root / "a/manifest.json").write_bytes(good)
    (store.root / "a/pages").unlink()
    assert "file pages of snapshot a is missing" in unusable(store)["c"]
    assert tags(store) == ["root"]
    assert store.get(C).manifest.tag == "c"  # which does not look at files
    with pytest.raises(SnapshotDamaged, match="file pages of snapshot a is missing"), store.held(C):
        pytest.fail("handed out")


def test_layers_that_lie_over_each_other_are_damaged(store: SnapshotStore) -> None:
    # Hashes make it impossible, if they are what they say.
    links = {tag: store._read_one(tag) for tag in ("a", "b")}
    links["a"] = replace(links["a"], hash="a" * 64, manifest=replace(links["a"].manifest, parent=Parent(B, "b" * 64)))
    links["b"] = replace(links["b"], hash="b" * 64, manifest=replace(links["b"].manifest, parent=Parent(A, "a" * 64)))
    with pytest.raises(SnapshotDamaged, match="b is a layer over a, which is a layer over it"):
        chain.follow_chain("a", lambda tag: links[tag])


def test_a_chain_is_only_so_deep(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_DEPTH", 3)
    with pytest.raises(Conflict, match="c has 3 snapshots below it") as caught:
        make_layer(store, "d", "c")
    with pytest.raises(Conflict, match="c has 3 snapshots below it"):
        with store.created(parse_tag("d"), replace_existing=False) as (_, seal):
            seal(manifest("d", store.get(C)))
    assert caught.value.hint is not None and "compact c" in caught.value.hint
    assert "d" not in entries(store.root)
    monkeypatch.setattr(chain, "MAX_DEPTH", 2)
    assert unusable(store) == {"c": "Snapshot c has more than 2 snapshots below it"}
    with pytest.raises(SnapshotDamaged, match="more than 2"), store.held(C):
        pytest.fail("handed out")


@pytest.mark.parametrize(
    "field", [{"engine": "qemu"}, {"image_id": "f" * 32}, {"machine": {"memory_mib": 64, "vcpus": 1}}]
)
def test_a_layer_of_another_machine_than_its_parent_is_damaged(store: SnapshotStore, field: dict[str, object]) -> None:
    edit(store, "c", **field)
    with pytest.raises(SnapshotDamaged, match="c is a layer over b, which is of another engine, machine or image"):
        store.get(C)


def test_dependents_are_the_layers_directly_over_it_and_a_subtree_is_all(store: SnapshotStore) -> None:
    assert store.dependents(ROOT) == ("a",)
    assert store.dependents(A) == ("b", "other")
    assert store.dependents(C) == ()
    assert store.subtree(A) == ("a", "b", "other", "c")
    edit(store, "other", format=99)  # of a newer forkd, and needs its parent all the same
    assert store.dependents(A) == ("b", "other")
    (store.root / "a/manifest.json").unlink()  # unreadable: it may be what they need
    assert store.dependents(A) == ("b", "other")


def test_what_layers_lie_over_is_not_removed_unasked(store: SnapshotStore) -> None:
    with pytest.raises(Conflict, match="Cannot remove: b, other are layers over a") as caught:
        store.remove(A)
    assert caught.value.hint is not None and "--cascade" in caught.value.hint and "--force" in caught.value.hint
    with pytest.raises(Conflict, match="c is a layer over b"):
        store.remove(A, B, OTHER)
    assert tags(store) == ["a", "b", "c", "other", "root"]
    assert set(store.remove(B, C)) == {"b", "c"}
    store.remove(OTHER, A)
    assert tags(store) == ["root"]


def test_cascade_removes_all_that_lies_over_it(store: SnapshotStore) -> None:
    assert set(store.remove(A, cascade=True)) == {"a", "b", "c", "other"}
    assert entries(store.root) == ["root"]


def test_force_removes_it_alone_and_its_layers_say_why_they_are_of_no_use(store: SnapshotStore) -> None:
    assert store.remove(B, force=True) == ("b",)
    assert unusable(store) == {"c": "Snapshot c is a layer over b, which is missing"}
    assert tags(store) == ["a", "other", "root"]
    # The tag is free, and what gets it has no layers.
    make_layer(store, "b", "root")
    assert unusable(store) == {"c": "Snapshot c is a layer over a b that was replaced since"}
    assert store.dependents(B) == ()
    store.remove(B, C)
    assert tags(store) == ["a", "other", "root"]


def test_removal_is_all_or_nothing(store: SnapshotStore) -> None:
    with pytest.raises(NotFound):
        store.remove(C, parse_tag("none"), cascade=True)
    with store.held(OTHER), pytest.raises(Conflict, match="in use"):
        store.remove(B, A, cascade=True)
    assert tags(store) == ["a", "b", "c", "other", "root"]


def test_what_layers_lie_over_is_not_replaced(store: SnapshotStore) -> None:
    with pytest.raises(Conflict, match="root cannot be replaced: a is a layer over it") as caught:
        make_root(store, replace=True)
    assert caught.value.hint is not None and "--cascade" in caught.value.hint
    # Nor when the layer came while the replacement was made.
    store.remove(A, cascade=True)
    with pytest.raises(Conflict, match="a is a layer over it"):
        with store.created(ROOT, replace_existing=True) as (staging, seal):
            make_layer(store, "a", "root")
            (staging / "memory").write_bytes(bytes(SIZE))
            seal(manifest("root"))
    assert tags(store) == ["a", "root"]


@pytest.mark.parametrize(
    ("meanwhile", "said"),
    [
        (lambda store: store.remove(C), "c was removed while a layer over it was made"),
        (lambda store: (store.remove(C), make_root(store, "c")), "c was replaced while a layer over it was made"),
    ],
    ids=["removed", "replaced"],
)
def test_a_layer_over_what_is_gone_by_then_is_not_published(
    store: SnapshotStore, meanwhile: Callable[[SnapshotStore], object], said: str
) -> None:
    parent = store.get(C)
    with pytest.raises(Conflict, match=said):
        with store.created(parse_tag("d"), replace_existing=False) as (_, seal):
            meanwhile(store)
            seal(manifest("d", parent))
    assert "d" not in entries(store.root)


def test_a_parent_cannot_be_removed_between_the_seal_of_a_layer_and_its_appearance(store: SnapshotStore) -> None:
    with store.created(parse_tag("d"), replace_existing=False) as (staging, seal):
        (staging / "state").write_text("x")
        seal(manifest("d", store.get(C)))
        with pytest.raises(Conflict, match="in use"):
            store.remove(C, force=True)
    assert store.dependents(C) == ("d",)


def test_a_compacted_snapshot_is_the_same_and_needs_no_other(store: SnapshotStore) -> None:
    with store.held(C) as snapshot:
        content = read_content(snapshot)
    flat = store.compact(C, parse_tag("flat"))
    assert (flat.manifest.parent, flat.depth, flat.manifest.settled) == (None, 0, False)
    assert flat.manifest.origin is not None and flat.manifest.origin.branched_from == "compact:c"
    assert (flat.directory / "state").read_text() == "state of c"
    assert entries(flat.directory) == ["manifest.json", "memory", "state"]
    store.remove(ROOT, cascade=True)
    assert tags(store) == ["flat"]
    with store.held(parse_tag("flat")) as flat:
        assert read_content(flat) == content
        # And goes on as any other.
        make_layer(store, "more", "flat", lambda guest: guest.write(0, b"x"))
    assert flat.disk_bytes() <= (PAGES // 2 + 8) * PAGE
    with pytest.raises(Conflict, match="exists already"):
        store.compact(parse_tag("more"), parse_tag("flat"))


def test_verify_reads_all_of_the_chain_and_names_what_it_is(store: SnapshotStore) -> None:
    verified = store.verify(C)
    assert verified.chain == ("root", "a", "b", "c")
    assert verified.files == 2 + 3 * 3
    assert verified.bytes == sum(
        path.stat().st_size
        for tag in verified.chain
        for path in (store.root / tag).iterdir()
        if path.name not in ("manifest.json", ".verified")
    )


@pytest.mark.parametrize(("tag", "name"), [("root", "memory"), ("a", "pages"), ("b", "extents"), ("c", "state")])
def test_a_flipped_bit_anywhere_in_the_chain_is_found_and_named(store: SnapshotStore, tag: str, name: str) -> None:
    store.verify(C)
    path = store.root / tag / name
    flip(path, 5)
    size = path.stat().st_size
    said = f"The file {name} of snapshot {tag} was altered: chunk 0 of {name}, bytes 0 to {size - 1}, does not match"
    for use in (store.verify, lambda tag: store.held(tag).__enter__()):
        with pytest.raises(SnapshotDamaged) as caught:
            use(C)
        assert caught.value.message == said
        assert caught.value.hint == f"Remove it and make it again: forkd snapshot rm {tag}"


def test_verify_finds_a_bit_that_flipped_on_the_disk_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path / "snapshots")
    with store.created(ROOT, replace_existing=False) as (staging, seal):
        with (staging / "memory").open("wb") as file:
            file.truncate(5 * CHUNK + 100)
        seal(manifest("root"))
    flip(store.root / "root/memory", 3 * CHUNK + 77)
    time.sleep(0.05)  # more than file times are coarse
    # It passed once as it is: nothing but its content tells.
    with monkeypatch.context() as patch:
        patch.setattr(files, "digest_chunks", lambda path: store.get(ROOT).manifest.files[path.name])
        with store.held(ROOT):
            pass
    with store.held(ROOT):
        pass
    with pytest.raises(SnapshotDamaged) as caught:
        store.verify(ROOT)
    assert f"chunk 3 of memory, bytes {3 * CHUNK} to {4 * CHUNK - 1}," in caught.value.message


_STEPS = """
import sys
from pathlib import Path
from chain_cases import make_layer, noise
from forkd.store.snapshots import SnapshotStore
store = SnapshotStore(Path(sys.argv[1]))
"""
_LAYER = "make_layer(store, 'd', 'c', lambda guest: guest.write(0, noise(9, 9)))"
_COMPACT = "store.compact('c', 'd')"
_CASCADE = "store.remove('a', cascade=True)"


@pytest.mark.parametrize(
    ("fault", "step", "left"),
    [
        ("layer.pages", _LAYER, "a b c other root"),
        ("layer.sealed", _LAYER, "a b c other root"),
        ("compact.written", _COMPACT, "a b c other root"),
        ("delete.renamed", _CASCADE, "a b other root"),
        ("delete.renamed@2", _CASCADE, "a b root"),
        ("delete.renamed@3", _CASCADE, "a root"),
        ("delete.renamed@4", _CASCADE, "root"),
    ],
)
def test_whoever_is_killed_half_way_leaves_only_snapshots_that_start(
    store: SnapshotStore, fault: str, step: str, left: str
) -> None:
    contents = {snapshot.manifest.tag: read_content(snapshot) for snapshot in store.list().snapshots}
    assert do(store, step, FORKD_FAULT=fault) == -signal.SIGKILL
    assert tags(store) == left.split()
    assert store.list().unusable == ()
    for tag in left.split():
        with store.held(SnapshotTag(tag)) as snapshot:
            assert read_content(snapshot) == contents[tag]
    sweep_staging(store.root)
    assert entries(store.root) == left.split()
    # The same works now.
    if left != "root":
        assert do(store, step) == 0
    assert store.list().unusable == ()


def do(store: SnapshotStore, step: str, **env: str) -> int:
    here = Path(__file__).parent
    paths = os.pathsep.join((str(here), str(here.parent)))
    command = [sys.executable, "-c", _STEPS + step, str(store.root)]
    return subprocess.run(command, env={**os.environ, **env, "PYTHONPATH": paths}, check=False).returncode


def test_two_layers_over_one_snapshot_can_be_made_at_once(store: SnapshotStore) -> None:
    with store.held(C) as below, started(below) as one, started(below) as other:
        one.write(0, b"one")
        other.write(0, b"other")
        with (
            store.created(parse_tag("one"), replace_existing=False) as (first, seal_first),
            store.created(parse_tag("two"), replace_existing=False) as (second, seal_second),
        ):
            write_layer(one.memory(), below, first)
            write_layer(other.memory(), below, second)
            seal_second(manifest("two", below))
            seal_first(manifest("one", below))
    for tag, said in (("one", b"one"), ("two", b"other")):
        with store.held(parse_tag(tag)) as snapshot:
            assert read_content(snapshot).startswith(said)


def test_layers_are_removed_before_what_they_lie_over_whatever_the_tree() -> None:
    tag = SnapshotTag
    children = {tag("r"): (tag("a"), tag("b")), tag("a"): (tag("c"),), tag("c"): (tag("d"),)}
    assert find_subtree(tag("r"), children) == ("r", "a", "b", "c", "d")
    assert leaves_first(map(tag, "rabcd"), children) == ["b", "d", "c", "a", "r"]
    circle = {tag("x"): (tag("y"),), tag("y"): (tag("x"),)}
    assert sorted(leaves_first(map(tag, "xy"), circle)) == ["x", "y"]
    assert set(find_subtree(tag("x"), circle)) == {"x", "y"}
    parents = {tag("a"): Parent(tag("r"), "1"), tag("b"): Parent(tag("gone"), "1")}
    assert find_children({tag("r"): "1", tag("a"): "2", tag("b"): "3"}, parents) == {"r": ("a",)}
    assert find_children({tag("r"): "4"}, parents) == {}
    assert find_children({tag("r"): None}, parents) == {"r": ("a",)}
