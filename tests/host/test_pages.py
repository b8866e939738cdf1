"""The memory of a real process that has a file mapped privately, as a VMM has."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_memory import Guest, running_guest

from forkd.errors import EngineFailed, GuestDied
from forkd.host.pages import (
    Area,
    Identity,
    Mapping,
    find_alone,
    find_memory,
    find_written,
    opened_memory,
    parse_mappings,
    render_areas,
)
from forkd.model.memory import PAGE, Run

SIZE = 64 * PAGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(b"".join(bytes([page + 1]) * PAGE for page in range(SIZE // PAGE)))
    return path


@pytest.fixture
def guest(root: Path) -> Iterator[Guest]:
    with running_guest(root) as guest:
        yield guest


def pages_of(spans: list[tuple[int, int]]) -> set[int]:
    return {page for start, end in spans for page in range(start // PAGE, end // PAGE)}


def read(guest: Guest, start: int = 0, length: int = SIZE) -> bytes:
    data = bytearray(length)
    with opened_memory(guest.memory()) as reader:
        reader.read_into(start, memoryview(data))
    return bytes(data)


def test_a_guest_that_wrote_nothing_has_no_pages_of_its_own(guest: Guest) -> None:
    guest.read(0, SIZE)
    memory = guest.memory()
    assert [(area.start, area.length) for area in memory.areas] == [(0, SIZE)]
    assert memory.size == SIZE
    assert find_written(memory) == []


def test_pages_that_were_written_are_found_and_no_others(guest: Guest) -> None:
    for page in (0, 3, 4, 5, 17, 63):
        guest.write(page * PAGE + 7, b"x")
    assert find_written(guest.memory()) == [
        (0, PAGE),
        (3 * PAGE, 6 * PAGE),
        (17 * PAGE, 18 * PAGE),
        (63 * PAGE, 64 * PAGE),
    ]


def test_of_a_fork_the_pages_are_found_that_it_has_written_itself(guest: Guest) -> None:
    for page in (0, 3, 17):
        guest.write(page * PAGE, b"x")
    for page in (3, 40):
        memory = guest.fork(page * PAGE)
        (area,) = memory.areas
        assert find_alone(memory) == [(area.address + page * PAGE, area.address + (page + 1) * PAGE)]
    assert pages_of(find_written(memory)) == {0, 3, 17, 40}


def test_what_is_read_is_what_the_guest_has(guest: Guest, root: Path) -> None:
    guest.write(5 * PAGE - 2, b"over the border")
    wanted = bytearray(root.read_bytes())
    wanted[5 * PAGE - 2 : 5 * PAGE + 13] = b"over the border"
    assert read(guest) == wanted
    assert read(guest, 4 * PAGE, 3 * PAGE) == wanted[4 * PAGE : 7 * PAGE]


def test_what_is_mapped_over_the_root_may_differ_wherever_it_lies(guest: Guest, tmp_path: Path) -> None:
    layer = tmp_path / "pages"
    layer.write_bytes(b"L" * 8 * PAGE)
    runs = [
        Run(0, 2 * PAGE, layer, 4 * PAGE),
        Run(10 * PAGE, 3 * PAGE, layer, 0),
        Run(20 * PAGE, PAGE, None, 0),
        Run(60 * PAGE, 4 * PAGE, layer, 0),
    ]
    guest.map_runs(runs)
    guest.write(30 * PAGE, b"x")
    memory = guest.memory()
    assert [(area.start, area.length) for area in memory.areas] == [(0, SIZE)]
    assert pages_of(find_written(memory)) == {0, 1, 10, 11, 12, 20, 30, 60, 61, 62, 63}
    data = read(guest)
    assert data[: 2 * PAGE] == b"L" * 2 * PAGE
    assert data[20 * PAGE : 21 * PAGE] == bytes(PAGE)
    assert data[2 * PAGE] == 3


def test_what_is_mapped_as_runs_say_differs_only_where_it_was_written(guest: Guest, tmp_path: Path) -> None:
    layer = tmp_path / "pages"
    layer.write_bytes(b"L" * 8 * PAGE)
    runs = (Run(4 * PAGE, 4 * PAGE, layer, 2 * PAGE), Run(10 * PAGE, 3 * PAGE, None, 0))
    guest.map_runs(runs)
    guest.read(0, SIZE)
    guest.write(5 * PAGE, b"x")
    guest.write(20 * PAGE, b"x")
    # Zeros that were read are the process's own as far as one sees.
    assert pages_of(find_written(guest.memory(), runs)) == {5, 10, 11, 12, 20}
    # What is mapped otherwise than they say may differ, and what they have and is not mapped.
    others = (Run(4 * PAGE, 2 * PAGE, layer, 2 * PAGE), Run(6 * PAGE, PAGE, layer, 0), Run(30 * PAGE, PAGE, layer, 0))
    assert pages_of(find_written(guest.memory(), others)) == {5, 6, 7, 10, 11, 12, 20, 30}
    assert pages_of(find_written(guest.memory())) == {4, 5, 6, 7, 10, 11, 12, 20}


def test_the_root_mapped_at_another_place_of_the_guest_may_differ(guest: Guest, root: Path) -> None:
    guest.map_runs([Run(8 * PAGE, 2 * PAGE, root, 30 * PAGE)])
    assert pages_of(find_written(guest.memory())) >= {8, 9}


def test_a_process_that_stands_still_is_read_as_any_other(guest: Guest) -> None:
    guest.write(9 * PAGE, b"still")
    os.kill(guest.process.pid, signal.SIGSTOP)
    assert pages_of(find_written(guest.memory())) == {9}
    assert read(guest, 9 * PAGE, PAGE)[:5] == b"still"
    os.kill(guest.process.pid, signal.SIGCONT)


def test_a_process_that_ended_is_said_to_have(guest: Guest) -> None:
    memory = guest.memory()
    with opened_memory(memory) as reader:
        guest.process.kill()
        guest.process.wait()
        with pytest.raises(GuestDied, match=f"Process {guest.process.pid} ended"):
            reader.read_into(0, memoryview(bytearray(PAGE)))
    with pytest.raises(GuestDied), opened_memory(memory):
        pass
    with pytest.raises(GuestDied):
        find_written(memory)
    with pytest.raises(GuestDied):
        guest.memory()


def test_a_process_that_does_not_map_the_file_has_no_guest_memory(guest: Guest, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    with pytest.raises(EngineFailed, match="does not map all of"):
        find_memory(guest.process.pid, other, SIZE)
    with pytest.raises(EngineFailed, match="cannot be read"):
        find_memory(guest.process.pid, tmp_path / "none", SIZE)


def test_lines_of_maps_are_read_with_any_path() -> None:
    maps = (
        "7f00-7f10 rw-p 00001000 fd:01 1234                       /a b/memory (deleted)\n"
        "8000-9000 ---s 00000000 00:00 0 \n"
    )
    assert parse_mappings(maps) == [
        Mapping(0x7F00, 0x7F10, True, 0x1000, (0xFD, 1), 1234, "/a b/memory (deleted)"),
        Mapping(0x8000, 0x9000, False, 0, (0, 0), 0, ""),
    ]


def test_a_memory_in_two_pieces_has_two_areas_whatever_covers_their_ends() -> None:
    def of_file(begin: int, end: int, offset: int) -> Mapping:
        return Mapping(begin * PAGE, end * PAGE, True, offset * PAGE, (8, 1), 5, "/memory")

    mappings = [
        of_file(102, 104, 2),  # of guest pages 0 to 6; 0, 1, 4 are covered
        of_file(105, 106, 5),
        Mapping(104 * PAGE, 105 * PAGE, True, 0, (8, 1), 6, "/pages"),
        of_file(200, 203, 6),  # of 6 to 10; 9 is covered
        Mapping(300 * PAGE, 301 * PAGE, False, 0, (8, 1), 5, "/memory"),  # shared: not the guest's
    ]
    areas = render_areas(mappings, Identity((8, 1), 5, "/memory"), 10 * PAGE)
    assert areas == (Area(0, 100 * PAGE, 6 * PAGE), Area(6 * PAGE, 200 * PAGE, 4 * PAGE))
    # The same file by its name, where maps shows another device.
    assert render_areas(mappings, Identity((0, 9), 5, "/memory"), 10 * PAGE) == areas
    assert render_areas(mappings, Identity((0, 9), 5, "/other"), 10 * PAGE) == ()
