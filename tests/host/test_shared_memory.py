"""Memory files that a process maps shared, twice in a row as Firecracker does: its duplicate has some of its own."""

from dataclasses import dataclass, field

from procfork_cases import forked_from, planned, python_started, refusal_of

from forkd.host.procfork.shared_memory import (
    MemoryFile,
    Piece,
    find_memory_files,
    is_memory_file,
    read_memory_files,
    render_remap,
)
from forkd.host.procfork.source import Source

# One page, mapped at two addresses in a row: what is written to the first is read from the second.
_MAP = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_long] * 5
fd = os.memfd_create("ring")
os.ftruncate(fd, 4096)
place = libc.mmap(None, 8192, 0, 0x22, -1, 0)
for half in (0, 4096):
    assert libc.mmap(place + half, 4096, 3, 0x11, fd, 0) == place + half
os.close(fd)
def write(at, text):
    ctypes.memmove(place + at, text, len(text))
def read(at, size):
    return ctypes.string_at(place + at, size)
write(100, b"before")
"""
_LINE = "7f000000{:01x}000-7f000000{:01x}000 rw-s {:08x} 00:01 77   /memfd:ring (deleted)\n"


@dataclass
class _Looked:
    files: dict[MemoryFile, bytes] = field(default_factory=dict)

    def look(self, source: Source) -> None:
        self.files = read_memory_files(source)


def test_a_duplicate_has_memory_files_of_its_own_with_the_same_content() -> None:
    looked = _Looked()
    plan = planned(look=looked.look, replaced=is_memory_file, set_up=lambda free: render_remap(looked.files, free))
    with python_started() as source:
        source.eval(_MAP)
        with forked_from(source, plan) as fork, forked_from(source, plan) as sibling:
            for each, text in ((source, b"source"), (fork, b"forked"), (sibling, b"others")):
                assert each.eval("read(4096 + 100, 6)") == b"before"
                each.eval(f"write(100, {text!r})")
            for each, text in ((source, b"source"), (fork, b"forked"), (sibling, b"others")):
                assert each.eval("read(4096 + 100, 6)") == text
            assert len(fork.descriptors()) == len(source.descriptors())


def test_without_them_it_is_not_forked() -> None:
    with python_started() as source:
        source.eval(_MAP)
        assert "/memfd:ring (deleted)" in refusal_of(source).message


def test_pieces_of_one_file_are_found_together() -> None:
    maps = (
        _LINE.format(1, 2, 0) + _LINE.format(2, 3, 0) + "7f0000009000-7f000000a000 rw-p 0 00:01 78 /memfd:x (deleted)\n"
    )
    (found,) = find_memory_files(maps)
    assert found == MemoryFile("ring", (Piece(0x7F0000001000, 4096, 0, 3), Piece(0x7F0000002000, 4096, 0, 3)))
    assert found.size == 4096


def test_what_is_zero_is_not_written() -> None:
    file = MemoryFile("ring", (Piece(4096, 8192, 0, 3),))
    empty, half = (len(render_remap({file: content}, 9)) for content in (bytes(8192), bytes(4096) + b"x" * 4096))
    assert half == empty + 1
