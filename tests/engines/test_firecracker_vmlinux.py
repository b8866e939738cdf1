"""The ELF program in a bzImage: made-up ones of each kind, hostile ones, and the real one of an image."""

import gzip
import lzma
import struct
import zlib
from collections.abc import Callable

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.engines.firecracker.vmlinux import MAX_KERNEL_BYTES, extract_elf
from forkd.errors import EngineFailed
from forkd.image import Image

_SETUP_SECTS = 3
_PVH_ENTRY = 18  # XEN_ELFNOTE_PHYS32_ENTRY
_PT_LOAD, _PT_NOTE = 1, 4


def render_elf(size: int = 5000, *, kind: int = 2, machine: int = 62) -> bytes:
    """A header, and bytes that do not pack to nothing."""
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", kind, machine)
    body = b"".join(struct.pack("<I", i * 2654435761 & 0xFFFFFFFF) for i in range(size // 4))
    return (head + body)[:size].ljust(64, b"\0")


def render_lz4(data: bytes, block: int = 8 << 20) -> bytes:
    pieces = [lz4.block.compress(data[at : at + block], store_size=False) for at in range(0, len(data), block)]
    return b"\x02\x21\x4c\x18" + b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)


def sized(data: bytes, size: int) -> bytes:
    return data + struct.pack("<I", size)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lambda data: sized(lzma.compress(data), len(data)),
    "lzma": lambda data: sized(lzma.compress(data, lzma.FORMAT_ALONE), len(data)),
    "lz4": lambda data: sized(render_lz4(data), len(data)),
    "lz4 in many blocks": lambda data: sized(render_lz4(data, 1000), len(data)),
}


def render_bzimage(payload: bytes, *, offset: int = 700, protocol: int = 0x020F, length: int | None = None) -> bytes:
    header = bytearray((_SETUP_SECTS + 1) * 512)
    header[0x1F1] = _SETUP_SECTS
    header[0x1FE:0x200] = b"\x55\xaa"
    header[0x202:0x208] = b"HdrS" + struct.pack("<H", protocol)
    header[0x248:0x250] = struct.pack("<II", offset, len(payload) if length is None else length)
    return bytes(header) + b"\x90" * offset + payload + b"what follows"


def refusal(bzimage: bytes) -> str:
    with pytest.raises(EngineFailed, match=r"^The image's kernel is not a kernel Firecracker can boot: ") as caught:
        extract_elf(bzimage)
    assert caught.value.hint is not None and "lz4" in caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_kernel_comes_out_as_it_went_in(kind: str) -> None:
    elf = render_elf()
    assert extract_elf(render_bzimage(PACKERS[kind](elf))) == elf


def test_a_kernel_without_a_count_of_setup_sectors_has_four() -> None:
    elf = render_elf()
    bzimage = bytearray(render_bzimage(gzip.compress(elf), offset=512))
    bzimage[0x1F1] = 0
    bzimage[0x248:0x24C] = struct.pack("<I", 0)  # one sector more of setup, and none before the payload
    assert extract_elf(bytes(bzimage)) == elf


def test_an_uncompressed_kernel_stays_as_it_is() -> None:
    elf = render_elf()
    assert extract_elf(elf) == elf


@pytest.mark.parametrize(
    ("bzimage", "why"),
    [
        (b"", "neither a bzImage nor an ELF"),
        (b"MZ", "neither a bzImage nor an ELF"),
        (bytes(4096), "neither a bzImage nor an ELF"),
        (b"#!/bin/sh\n" * 500, "neither a bzImage nor an ELF"),
        (render_bzimage(b"")[:0x240], "neither a bzImage nor an ELF"),
        (render_bzimage(gzip.compress(render_elf()), protocol=0x0207), "boot protocol 2.07 is too old"),
        (render_bzimage(gzip.compress(render_elf()), length=1 << 20), "ends before its payload"),
        (render_bzimage(gzip.compress(render_elf()), offset=700)[:1500], "ends before its payload"),
        (render_bzimage(b"", offset=0, length=0xFFFFFFFF), "ends before its payload"),
        (render_bzimage(b""), "payload is empty"),
        (render_bzimage(b"\0\0\0\0"), "payload is empty"),
        (render_bzimage(sized(b"BZh9", 5)), "compression is unknown"),
        (render_bzimage(sized(b"\x28\xb5\x2f\xfd" + bytes(99), 5)), "packed with zstd"),
        (render_bzimage(gzip.compress(b"no program at all" * 9)), "not an ELF program"),
        (render_bzimage(gzip.compress(render_elf()[:20])), "not an ELF program"),
        (render_bzimage(gzip.compress(render_elf(machine=183))), "not a program of x86_64"),
        (render_bzimage(gzip.compress(render_elf(kind=1))), "not a program of x86_64"),
        (render_elf(machine=183), "not a program of x86_64"),
        (b"\x7fELF\x02\x01", "not an ELF program"),
        (b"\x7fELF\x01\x01" + bytes(4096), "neither a bzImage nor an ELF"),
    ],
)
def test_what_is_no_kernel_is_refused_with_the_reason(bzimage: bytes, why: str) -> None:
    assert why in refusal(bzimage)


@pytest.mark.parametrize("kind", PACKERS)
def test_a_damaged_payload_is_refused(kind: str) -> None:
    payload = PACKERS[kind](render_elf())
    cut = sized(payload[: len(payload) // 2], len(render_elf()))
    assert refusal(render_bzimage(cut))
    middle = len(payload) // 2
    spoiled = payload[:middle] + b"\xff" * 64 + payload[middle + 64 :]
    if "lz4" not in kind:  # which has no checksum
        assert refusal(render_bzimage(spoiled))


@pytest.mark.parametrize("kind", PACKERS)
def test_a_kernel_that_unpacks_to_more_than_it_says_is_not_unpacked_further(kind: str) -> None:
    bomb = PACKERS[kind](render_elf() + bytes(40 << 20))
    assert "does not unpack to the 6000 bytes" in refusal(render_bzimage(sized(bomb[:-4], 6000)))


@pytest.mark.parametrize("size", [MAX_KERNEL_BYTES + 1, 0xFFFFFFFF])
def test_a_kernel_that_says_to_be_huge_is_not_unpacked_at_all(size: int) -> None:
    assert f"unpacked size of {size} bytes" in refusal(render_bzimage(sized(zlib.compress(b"", wbits=31)[:-4], size)))


@pytest.mark.parametrize("head", [b"\x02\x21\x4c\x18", b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x5d\x00\x00"])
@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=300))
def test_any_payload_is_unpacked_or_refused(head: bytes, body: bytes) -> None:
    refusal(render_bzimage(sized(head + body, 1000)))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_setup_header_is_read_or_refused(data: st.DataObject) -> None:
    elf = render_elf(400)
    bzimage = bytearray(render_bzimage(PACKERS["lz4"](elf)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from([0x1F1, *range(0x202, 0x208), *range(0x248, 0x250)]))
        bzimage[at] = data.draw(st.integers(0, 255))
    try:
        assert extract_elf(bytes(bzimage)) == elf
    except EngineFailed:
        pass


def test_the_kernel_of_an_image_is_a_program_that_can_be_entered(python_image: Image) -> None:
    elf = extract_elf(python_image.kernel.read_bytes())
    kind, machine = struct.unpack_from("<HH", elf, 16)
    assert elf[:6] == b"\x7fELF\x02\x01" and (kind, machine) == (2, 62)
    (entry, table) = struct.unpack_from("<QQ", elf, 24)
    size, count = struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", elf, table + i * size) for i in range(count)]
    for segment in segments:
        assert segment[2] + segment[5] <= len(elf)
    # Firecracker enters at the PVH note if there is one, else at the entry point, both physical.
    notes = [elf[segment[2] : segment[2] + segment[5]] for segment in segments if segment[0] == _PT_NOTE]
    entries = [entry, *(pvh for note in notes for pvh in find_pvh_entries(note))]
    loaded = [(segment[4], segment[4] + segment[5]) for segment in segments if segment[0] == _PT_LOAD]
    assert len(entries) == 2 and loaded
    for address in entries:
        assert any(begin <= address < end for begin, end in loaded), hex(address)


def find_pvh_entries(notes: bytes) -> list[int]:
    found, at = [], 0
    while at + 12 <= len(notes):
        name_size, value_size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_size]
        value = at + 12 + (name_size + 3 & ~3)
        if name == b"Xen\0" and kind == _PVH_ENTRY:
            found.append(int.from_bytes(notes[value : value + value_size], "little"))
        at = value + (value_size + 3 & ~3)
    return found
