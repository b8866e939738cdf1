"""The kernel as Firecracker wants it: the ELF program that is packed in a bzImage. Pure.

The setup header of a bzImage says where its payload is (Documentation/arch/x86/boot.rst); the payload is the packed
ELF followed by its length, which gzip's own trailer is too.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable

import lz4.block

from forkd.errors import EngineFailed

MAX_KERNEL_BYTES = 256 * 1024 * 1024

_SETUP_SECTS = 0x1F1
_SIGNATURE = 0x202
_PAYLOAD = 0x248
_HEADER_BYTES = 0x250
_OLDEST_PROTOCOL = 0x0208  # the first that tells where the payload is
_SECTOR_BYTES = 512
_SIZE_BYTES = 4
# Of the legacy lz4 framing: blocks of at most this much, each after its packed length.
_LZ4_BLOCK_BYTES = 8 * 1024 * 1024
_LZ4_BLOCK_HEAD_BYTES = 4
_LZMA_MEMORY_BYTES = 128 * 1024 * 1024

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_EXECUTABLE, _X86_64 = 2, 62

_HINT = "Use an uncompressed vmlinux, or a bzImage packed with gzip, xz, lzma or lz4 as Debian's kernels are"


def extract_elf(bzimage: bytes) -> bytes:
    """The ELF program in a bzImage; one that is given as such stays as it is."""
    if bzimage.startswith(_ELF64_LITTLE):
        return _checked(bzimage)
    payload = find_payload(bzimage)
    (size,) = struct.unpack_from("<I", payload, len(payload) - _SIZE_BYTES)
    if size > MAX_KERNEL_BYTES:
        raise _not_a_kernel(f"it claims an unpacked size of {size} bytes")
    elf = _find_unpacker(payload)(payload, size)
    if len(elf) != size:
        raise _not_a_kernel(f"it does not unpack to the {size} bytes it names")
    return _checked(elf)


def find_payload(bzimage: bytes) -> bytes:
    if len(bzimage) < _HEADER_BYTES or bzimage[_SIGNATURE : _SIGNATURE + 4] != b"HdrS":
        raise _not_a_kernel("it is neither a bzImage nor an ELF program of x86_64")
    (protocol,) = struct.unpack_from("<H", bzimage, _SIGNATURE + 4)
    if protocol < _OLDEST_PROTOCOL:
        raise _not_a_kernel(f"its boot protocol {protocol >> 8}.{protocol & 0xFF:02} is too old")
    offset, length = struct.unpack_from("<II", bzimage, _PAYLOAD)
    begin = ((bzimage[_SETUP_SECTS] or 4) + 1) * _SECTOR_BYTES + offset
    payload = bzimage[begin : begin + length]
    if len(payload) < length:
        raise _not_a_kernel("it ends before its payload does")
    if length <= _SIZE_BYTES:
        raise _not_a_kernel("its payload is empty")
    return payload


def _find_unpacker(payload: bytes) -> Callable[[bytes, int], bytes]:
    for magic, unpack in _UNPACKERS.items():
        if payload.startswith(magic):
            return unpack
    raise _not_a_kernel("its compression is unknown")


def _unpack_gzip(payload: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(payload, size + 1)
    except zlib.error as error:
        raise _not_a_kernel("its gzip data is damaged") from error


def _unpack_lzma(payload: bytes, size: int) -> bytes:
    try:
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY_BYTES).decompress(payload, size + 1)
    except lzma.LZMAError as error:
        raise _not_a_kernel("its xz or lzma data is damaged") from error


def _unpack_lz4(payload: bytes, size: int) -> bytes:
    pieces: list[bytes] = []
    unpacked, at, end = 0, len(_LZ4_MAGIC), len(payload) - _SIZE_BYTES
    while at < end and unpacked <= size:
        (packed,) = struct.unpack_from("<I", payload, at)
        at += _LZ4_BLOCK_HEAD_BYTES
        if not 0 < packed <= end - at:
            raise _not_a_kernel("its lz4 data is damaged")
        try:
            piece = lz4.block.decompress(payload[at : at + packed], uncompressed_size=_LZ4_BLOCK_BYTES)
        except lz4.block.LZ4BlockError as error:
            raise _not_a_kernel("its lz4 data is damaged") from error
        pieces.append(piece)
        unpacked += len(piece)
        at += packed
    return b"".join(pieces)


def _refuse_zstd(payload: bytes, size: int) -> bytes:
    raise _not_a_kernel("it is packed with zstd, which is not supported")


_LZ4_MAGIC = b"\x02\x21\x4c\x18"
_UNPACKERS: dict[bytes, Callable[[bytes, int], bytes]] = {
    b"\x1f\x8b": _unpack_gzip,
    b"\xfd7zXZ\x00": _unpack_lzma,
    b"\x5d\x00\x00": _unpack_lzma,
    _LZ4_MAGIC: _unpack_lz4,
    b"\x28\xb5\x2f\xfd": _refuse_zstd,
}


def _checked(elf: bytes) -> bytes:
    if len(elf) < 64 or not elf.startswith(_ELF64_LITTLE):
        raise _not_a_kernel("what it holds is not an ELF program")
    if struct.unpack_from("<HH", elf, 16) != (_EXECUTABLE, _X86_64):
        raise _not_a_kernel("its ELF file is not a program of x86_64")
    return elf


def _not_a_kernel(why: str) -> EngineFailed:
    return EngineFailed(f"The image's kernel is not a kernel Firecracker can boot: {why}", hint=_HINT)
