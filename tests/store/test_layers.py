"""Layers: what they hold, what they leave out, and that nothing in their files is believed unseen."""

import os
import random
import struct
from pathlib import Path

import pytest
from chain_cases import PAGES, SIZE, make_layer, make_root, manifest, noise, read_content, started
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_memory import Guest

from forkd.errors import EngineFailed, GuestDied, SnapshotDamaged
from forkd.host.pages import Area, LiveMemory, opened_memory
from forkd.model.memory import PAGE, Run
from forkd.model.names import parse_tag
from forkd.store import layers
from forkd.store.content import write_whole
from forkd.store.extents import MAGIC, MAX_EXTENTS, ZEROS, parse_extents, render_extents, runs_of
from forkd.store.layers import write_layer
from forkd.store.snapshots import SnapshotStore

ROOT, LAYER = parse_tag("root"), parse_tag("layer")


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path / "snapshots")
    make_root(store)
    return store


def content_with(store: SnapshotStore, *writes: tuple[int, bytes]) -> bytes:
    """The root's, with pages changed."""
    data = bytearray(read_content(store.get(ROOT)))
    for page, new in writes:
        data[page * PAGE : page * PAGE + len(new)] = new
    return bytes(data)


def test_a_layer_holds_what_was_written_and_its_snapshot_reads_as_the_guest_did(store: SnapshotStore) -> None:
    writes = [(3, noise(2, 1)), (100, noise(1, 2)), (200, noise(5, 3))]

    def change(guest: Guest) -> None:
        for page, data in writes:
            guest.write(page * PAGE, data)

    stats = make_layer(store, "layer", "root", change)
    assert (stats.bytes_dirty, stats.extents) == (8 * PAGE, 3)
    with store.held(LAYER) as snapshot:
        assert read_content(snapshot) == content_with(store, *writes)
        pages = snapshot.directory / "pages"
        assert snapshot.runs == (
            Run(3 * PAGE, 2 * PAGE, pages, 0),
            Run(100 * PAGE, PAGE, pages, 2 * PAGE),
            Run(200 * PAGE, 5 * PAGE, pages, 3 * PAGE),
        )
        assert pages.stat().st_size == 8 * PAGE
        assert stats.bytes_written == pages.stat().st_size + (snapshot.directory / "extents").stat().st_size


def test_a_vm_of_a_snapshot_has_the_memory_of_the_one_it_was_made_of(store: SnapshotStore) -> None:
    make_layer(store, "layer", "root", lambda guest: guest.write(77 * PAGE + 5, b"only here"))
    with store.held(LAYER) as snapshot, started(snapshot) as child:
        data = bytearray(SIZE)
        with opened_memory(child.memory()) as reader:
            reader.read_into(0, memoryview(data))
        assert data == read_content(snapshot)
        assert data[77 * PAGE + 5 :][:9] == b"only here"


def test_a_page_that_was_written_and_is_as_before_is_not_stored(store: SnapshotStore) -> None:
    root = content_with(store)

    def change(guest: Guest) -> None:
        guest.write(10 * PAGE, root[10 * PAGE : 14 * PAGE])
        guest.read(200 * PAGE, PAGE)
        guest.write(201 * PAGE, bytes(PAGE))

    stats = make_layer(store, "layer", "root", change)
    assert (stats.bytes_looked_at, stats.bytes_dirty, stats.extents) == (5 * PAGE, 0, 0)
    with store.held(LAYER) as snapshot:
        assert snapshot.runs == ()
        assert read_content(snapshot) == root


def test_zero_pages_are_not_stored(store: SnapshotStore) -> None:
    stats = make_layer(store, "layer", "root", lambda guest: guest.write(10 * PAGE, bytes(100 * PAGE)))
    assert (stats.bytes_dirty, stats.bytes_zero, stats.extents) == (100 * PAGE, 100 * PAGE, 1)
    with store.held(LAYER) as snapshot:
        assert (snapshot.directory / "pages").stat().st_size == 0
        assert snapshot.runs == (Run(10 * PAGE, 100 * PAGE, None, 0),)
        assert read_content(snapshot) == content_with(store, (10, bytes(100 * PAGE)))


def test_what_the_layer_has_already_is_not_stored_twice(store: SnapshotStore) -> None:
    block = noise(8, 5)

    def change(guest: Guest) -> None:
        guest.write(4 * PAGE, block)
        guest.write(40 * PAGE, block + noise(1, 6))  # eight in a row, then another
        guest.write(60 * PAGE, block[PAGE : 2 * PAGE])  # alone

    stats = make_layer(store, "layer", "root", change)
    assert (stats.bytes_dirty, stats.bytes_duplicate) == (18 * PAGE, 9 * PAGE)
    with store.held(LAYER) as snapshot:
        assert (snapshot.directory / "pages").stat().st_size == 9 * PAGE
        assert read_content(snapshot) == content_with(
            store, (4, block), (40, block + noise(1, 6)), (60, block[PAGE : 2 * PAGE])
        )


def test_a_lone_zero_or_known_page_amid_others_is_stored_as_mappings_cost_more(store: SnapshotStore) -> None:
    first = noise(1, 7)
    data = first + noise(3, 8) + bytes(PAGE) + noise(3, 9) + first + noise(3, 10)
    stats = make_layer(store, "layer", "root", lambda guest: guest.write(20 * PAGE, data))
    assert (stats.extents, stats.bytes_zero, stats.bytes_duplicate) == (1, 0, 0)
    with store.held(LAYER) as snapshot:
        assert read_content(snapshot) == content_with(store, (20, data))


def test_one_page_repeated_takes_a_few(store: SnapshotStore) -> None:
    stats = make_layer(store, "layer", "root", lambda guest: guest.write(0, b"\xff" * SIZE))
    assert stats.bytes_dirty == SIZE
    with store.held(LAYER) as snapshot:
        assert (snapshot.directory / "pages").stat().st_size <= 4 * PAGE
        assert read_content(snapshot) == b"\xff" * SIZE


def test_pages_with_equal_hashes_are_compared(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "hash", lambda page: 1, raising=False)
    data = noise(40, 11)
    make_layer(store, "layer", "root", lambda guest: guest.write(20 * PAGE, data))
    with store.held(LAYER) as snapshot:
        assert read_content(snapshot) == content_with(store, (20, data))


def test_layers_over_layers_hold_only_what_differs_from_the_one_below(store: SnapshotStore) -> None:
    expected = bytearray(content_with(store))
    numbers = random.Random(1)
    below = "root"
    for depth in range(1, 9):
        pages = numbers.sample(range(PAGES), 6)
        new = {page: numbers.choice([noise(1, depth * 1000 + page), bytes(PAGE)]) for page in pages}

        def change(guest: Guest, new: dict[int, bytes] = new) -> None:
            for page, data in new.items():
                guest.write(page * PAGE, data)

        before = bytes(expected)
        for page, data in new.items():
            expected[page * PAGE : (page + 1) * PAGE] = data
        differ = sum(before[at : at + PAGE] != expected[at : at + PAGE] for at in range(0, SIZE, PAGE))
        stats = make_layer(store, f"layer-{depth}", below, change)
        below = f"layer-{depth}"
        assert stats.bytes_dirty == differ * PAGE
        with store.held(parse_tag(below)) as snapshot:
            assert snapshot.depth == depth
            assert read_content(snapshot) == expected
    # Back to what the root had: stored, as the parent has something else.
    page = next(run.start for run in snapshot.runs) // PAGE
    root = content_with(store)[page * PAGE : (page + 1) * PAGE]
    stats = make_layer(store, "back", below, lambda guest: guest.write(page * PAGE, root))
    assert stats.bytes_dirty == PAGE
    with store.held(parse_tag("back")) as snapshot:
        assert read_content(snapshot)[page * PAGE : (page + 1) * PAGE] == root


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_whatever_a_guest_writes_the_layer_has_it_in_at_most_a_fifth_more_bytes(
    store: SnapshotStore, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from("....zabr"), min_size=PAGES, max_size=PAGES))
    page_of = {"z": bytes(PAGE), "a": b"a" * PAGE, "b": noise(1, 99)}
    root = content_with(store)
    expected = b"".join(
        root[at * PAGE : (at + 1) * PAGE] if kind == "." else page_of.get(kind, noise(1, 1000 + at))
        for at, kind in enumerate(kinds)
    )
    staging = tmp_path_factory.mktemp("staging")
    with store.held(ROOT) as snapshot, started(snapshot) as guest:
        for at, kind in enumerate(kinds):
            if kind != ".":
                guest.write(at * PAGE, expected[at * PAGE : (at + 1) * PAGE])
        stats = write_layer(guest.memory(), snapshot, staging)
        write_whole(guest.memory(), staging)
    differ = sum(expected[at : at + PAGE] != root[at : at + PAGE] for at in range(0, SIZE, PAGE)) * PAGE
    assert stats.bytes_dirty == differ
    index, pages = (staging / "extents").read_bytes(), (staging / "pages").read_bytes()
    assert stats.bytes_written == len(index) + len(pages)
    assert len(index) + len(pages) <= 1.2 * differ + PAGE
    built = bytearray(root)
    for first, count, place in parse_extents(index, pages_bytes=len(pages), memory_bytes=SIZE):
        held = bytes(count * PAGE) if place == ZEROS else pages[place * PAGE : (place + count) * PAGE]
        built[first * PAGE : (first + count) * PAGE] = held
    assert built == expected
    assert (staging / "memory").read_bytes() == expected


def test_a_guest_that_changed_very_many_places_gets_a_layer_that_can_be_mapped(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MANY_EXTENTS", 20)
    monkeypatch.setattr(layers, "BATCH", 32 * PAGE)

    def change(guest: Guest) -> None:
        for page in range(0, PAGES, 2):
            guest.write(page * PAGE, noise(1, page + 1))

    stats = make_layer(store, "layer", "root", change)
    assert stats.bytes_dirty == SIZE // 2
    assert stats.extents <= 20 + 16 + PAGES // 32
    with store.held(LAYER) as snapshot:
        assert read_content(snapshot) == content_with(
            store, *((page, noise(1, page + 1)) for page in range(0, PAGES, 2))
        )


def test_a_chain_that_could_not_be_mapped_is_taken_over_by_its_next_layer(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAX_RUNS", 40)
    below, writes = "root", []
    for depth in range(1, 6):
        new = [(page, noise(1, page)) for page in range(depth, PAGES, 16)]
        writes += new
        make_layer(
            store,
            f"layer-{depth}",
            below,
            lambda guest, new=new: [guest.write(page * PAGE, data) for page, data in new],
        )
        below = f"layer-{depth}"
        with store.held(parse_tag(below)) as snapshot:
            assert len(snapshot.runs) <= 40
            assert read_content(snapshot) == content_with(store, *writes)
    stored = [(store.root / f"layer-{depth}/pages").stat().st_size // PAGE for depth in range(1, 6)]
    assert stored == [16, 16, 48, 16, 80]


def test_a_vm_of_another_snapshot_or_none_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    with store.held(ROOT) as snapshot, started(snapshot) as guest:
        memory = guest.memory()
        small = LiveMemory(memory.pid, memory.file, (Area(0, memory.areas[0].address, SIZE // 2),))
        with pytest.raises(EngineFailed, match="is not of snapshot root"):
            write_layer(small, snapshot, tmp_path)
        guest.process.kill()
        guest.process.wait()
        with pytest.raises(GuestDied):
            write_layer(memory, snapshot, tmp_path)


def test_a_vm_of_another_chain_is_compared_as_a_whole(store: SnapshotStore) -> None:
    """As one that runs on when its chain was compacted, or another snapshot is to be the parent."""
    make_root(store, "other", seed=5)
    with (
        store.held(ROOT) as mine,
        started(mine) as guest,
        store.held(parse_tag("other")) as parent,
        store.created(LAYER, replace_existing=False) as (staging, seal),
    ):
        guest.write(9 * PAGE, b"x")
        stats = write_layer(guest.memory(), parent, staging)
        seal(manifest("layer", parent))
    assert stats.bytes_dirty == SIZE // 2
    with store.held(LAYER) as snapshot:
        assert read_content(snapshot) == content_with(store, (9, b"x"))


def test_a_vm_that_ran_on_when_it_was_branched_is_compared_with_its_last_branch(store: SnapshotStore) -> None:
    with store.held(ROOT) as root, started(root) as guest:
        expected = []
        for number, below in enumerate(("root", "one", "two")):
            guest.write((10 + number) * PAGE, noise(2, 50 + number))
            guest.write(100 * PAGE, noise(1, 60 + number))
            expected += [(10 + number, noise(2, 50 + number)), (100, noise(1, 60 + number))]
            tag = ("one", "two", "three")[number]
            with (
                store.held(parse_tag(below)) as parent,
                store.created(parse_tag(tag), replace_existing=False) as (staging, seal),
            ):
                stats = write_layer(guest.memory(), parent, staging)
                seal(manifest(tag, parent))
            assert stats.bytes_dirty == 3 * PAGE
            with store.held(parse_tag(tag)) as snapshot:
                assert read_content(snapshot) == content_with(store, *expected)


def test_progress_is_told_as_it_goes(store: SnapshotStore, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with store.held(ROOT) as snapshot, started(snapshot) as guest:
        guest.write(PAGE, noise(2, 1))
        guest.write(9 * PAGE, noise(1, 2))
        write_layer(guest.memory(), snapshot, tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(2 * PAGE, 3 * PAGE), (3 * PAGE, 3 * PAGE)]


def test_a_whole_memory_is_sparse_and_the_same(store: SnapshotStore, tmp_path: Path) -> None:
    make_layer(store, "layer", "root", lambda guest: guest.write(50 * PAGE, bytes(20 * PAGE) + noise(1, 3)))
    with store.held(LAYER) as snapshot:
        stats = write_whole(snapshot, tmp_path)
        assert (tmp_path / "memory").read_bytes() == read_content(snapshot)
        assert (stats.bytes_logical, stats.bytes_written) == (SIZE, (PAGES // 2 - 20) * PAGE)
        assert (tmp_path / "memory").stat().st_blocks * 512 <= stats.bytes_written + PAGE


GOOD = [(0, 2, 0), (2, 1, ZEROS), (5, 3, 0), (8, 2, 2)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.one_of(st.just(ZEROS), st.integers(0, 3))), max_size=20)
)
def test_extents_survive_their_way_to_disk_and_back(parts: list[tuple[int, int, int]]) -> None:
    extents, last = [], 0
    for gap, count, place in parts:
        extents.append((last + gap, count, place))
        last += gap + count
    data = render_extents(extents)
    assert parse_extents(data, pages_bytes=8 * PAGE, memory_bytes=last * PAGE) == extents
    assert [run.start for run in runs_of(extents, Path("pages"))] == [first * PAGE for first, _, _ in extents]


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 0, 0)],
        [(0, 2, 0), (1, 1, 0)],
        [(4, 1, 0), (2, 1, 0)],
        [(9, 2, 0)],
        [(10, 1, ZEROS)],
        [(0, 1 << 63, ZEROS)],
        [((1 << 64) - 1, 1, ZEROS)],
        [((1 << 64) - 1, (1 << 64) - 1, ZEROS)],
        [(0, 1, 4)],
        [(0, 3, 2)],
        [(0, 1, ZEROS - 1)],
    ],
    ids=range(11),
)
def test_extents_that_lead_elsewhere_are_refused(extents: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError):
        parse_extents(render_extents(extents), pages_bytes=4 * PAGE, memory_bytes=10 * PAGE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC,
        b"x" * 16,
        render_extents(GOOD)[:-1],
        render_extents(GOOD) + b"\0",
        MAGIC + struct.pack("<Q", 1 << 63),
        MAGIC + struct.pack("<Q", MAX_EXTENTS + 1) + bytes(24 * (MAX_EXTENTS + 1)),
    ],
    ids=range(7),
)
def test_what_are_no_extents_is_refused(data: bytes) -> None:
    assert parse_extents(render_extents(GOOD), pages_bytes=4 * PAGE, memory_bytes=10 * PAGE) == GOOD
    with pytest.raises(ValueError):
        parse_extents(data, pages_bytes=4 * PAGE, memory_bytes=10 * PAGE)


def test_a_layer_with_bad_extents_is_damaged_though_its_checksums_match(store: SnapshotStore) -> None:
    root = store.get(ROOT)
    for number, extents in enumerate(([(PAGES, 1, 0)], [(0, 1, 1)], [(3, 1, 0), (3, 1, 0)])):
        tag = parse_tag(f"bad-{number}")
        with store.created(tag, replace_existing=False) as (staging, seal):
            (staging / "pages").write_bytes(noise(1))
            (staging / "extents").write_bytes(render_extents(extents))
            seal(manifest(tag, root))
        with pytest.raises(SnapshotDamaged, match=f"file extents of snapshot {tag} is damaged"), store.held(tag):
            pytest.fail("handed out")


def test_a_file_that_is_cut_short_while_it_is_read_is_damage_and_not_our_end(store: SnapshotStore) -> None:
    with store.held(ROOT) as snapshot:
        os.truncate(store.root / "root/memory", PAGE)
        with pytest.raises(SnapshotDamaged, match="shorter than it was"):
            read_content(snapshot)
