"""Which parts of a layer are mapped and which are copied, and the calls for it. Pure."""

from pathlib import Path

import pytest

from forkd.engines.qemu.memory import (
    MOST_MAPPED,
    Content,
    choose_mapped,
    find_address,
    render_mapping,
)
from forkd.errors import EngineFailed
from forkd.model.memory import PAGE, Run

PAGES = Path("/s/pages")
_MAPS = """\
7f0000000000-7f0000010000 rw-s 00000000 fe:01 77                         /s/a b/memory
7f0000020000-7f0000021000 rw-p 00000000 00:00 0
7f0000030000-7f0000031000 r--p 00000000 fe:01 78                         /usr/lib/memory
"""


def test_the_largest_runs_are_mapped_in_their_order_and_the_rest_is_copied() -> None:
    small = [Run((2 * number + 1) * PAGE, PAGE, PAGES, number * PAGE) for number in range(2 * MOST_MAPPED)]
    large = Run(1 << 40, 3 * PAGE, PAGES, 1 << 30)
    mapped, copied = choose_mapped([*small, large])
    assert len(mapped) == MOST_MAPPED and mapped[-1] == large
    assert mapped == sorted(mapped, key=lambda run: run.start)
    assert sorted([*mapped, *copied], key=lambda run: run.start) == [*small, large]


def test_runs_that_go_on_are_one_and_the_first_page_is_always_copied() -> None:
    runs = [Run(0, PAGE, PAGES, 0), Run(PAGE, 2 * PAGE, PAGES, PAGE), Run(3 * PAGE, PAGE, None, 0)]
    assert choose_mapped(runs) == (
        [Run(PAGE, 2 * PAGE, PAGES, PAGE), Run(3 * PAGE, PAGE, None, 0)],
        [Run(0, PAGE, PAGES, 0)],
    )
    assert choose_mapped([Run(0, 2 * PAGE, None, 0)]) == ([Run(PAGE, PAGE, None, 0)], [Run(0, PAGE, None, 0)])
    assert choose_mapped([]) == ([], [])


def test_the_file_is_mapped_privately_then_runs_then_descriptors_are_closed() -> None:
    content = Content(
        Path("/s/memory"), 8, (Run(PAGE, PAGE, PAGES, 5 * PAGE), Run(2 * PAGE, PAGE, None, 0)), fds=((PAGES, 9),)
    )
    calls = render_mapping(content, 0x10000, 4 * PAGE, 7)
    assert [(call.number, call.args) for call in calls] == [
        (9, (0x10000, 4 * PAGE, 3, 0x12, 8, 0)),
        (292, (8, 7, 0x80000)),  # in place of what was there
        (3, (8,)),
        (9, (0x11000, PAGE, 3, 0x12, 9, 5 * PAGE)),
        (9, (0x12000, PAGE, 3, 0x32, 2**64 - 1, 0)),
        (3, (9,)),
    ]
    assert [call.returns for call in calls if call.number == 9] == [0x10000, 0x11000, 0x12000]
    with pytest.raises(EngineFailed, match="the VM has 8192 bytes"):
        render_mapping(content, 0x10000, 2 * PAGE, 7)


def test_memory_is_found_by_its_name_and_only_whole() -> None:
    assert find_address(_MAPS, "/s/a b/memory", 0x10000) == 0x7F0000000000
    for link, size in (("/s/a b/memory", 0x20000), ("/memory", 0x10000)):
        with pytest.raises(EngineFailed, match="in one piece"):
            find_address(_MAPS, link, size)
