"""The bytes of a pack: a tar archive in zstd frames of one size, each announced by its length.

    (skippable frame: length of the next, and of what is in it) (zstd frame) ...

Any zstd reads it, as skippable frames are skipped. We know how much a frame may hold before we inflate it, can make any
frame without those before it, and several at once. The tar headers are for people: ours are compared, never believed.
"""

from __future__ import annotations

import struct
import tarfile
import threading

import zstandard

from forkd.store.pack_manifest import refused

FRAME = 4 << 20  # of the archive, in each frame but the last of the head and the last of all
LEVEL = 3  # docs/how-to/packs.md has what the others cost
TAR_BLOCK = 512
END = bytes(2 * TAR_BLOCK)
ANNOUNCED = 16
_SKIPPABLE = 0x184D2A5E
_HEADER = struct.Struct("<IIII")
_MOST = FRAME + (FRAME >> 7) + 1024  # a frame of noise is a little larger than the noise

_local = threading.local()


def make_frame(data: bytes, level: int = LEVEL) -> bytes:
    compressor = getattr(_local, "compressor", None)
    if compressor is None or _local.level != level:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
        _local.level = level
    packed: bytes = compressor.compress(data)
    return _HEADER.pack(_SKIPPABLE, 8, len(packed), len(data)) + packed


def parse_announced(header: bytes) -> tuple[int, int]:
    """How long the next frame is, and how much is in it."""
    magic, length, packed, size = _HEADER.unpack(header)
    if (magic, length) != (_SKIPPABLE, 8) or not 0 < packed <= _MOST or not 0 < size <= FRAME:
        raise refused("it is not a forkd pack, or was altered on its way")
    return packed, size


def open_frame(frame: bytes, size: int) -> bytes:
    """Exactly `size` bytes, or refused: nothing more is ever inflated."""
    try:
        params = zstandard.get_frame_parameters(frame)
        if params.content_size != size or params.window_size > FRAME or params.dict_id:
            raise refused("a frame holds something other than it was announced with")
        data: bytes = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise refused("a frame is damaged") from error
    if len(data) != size:
        raise refused("a frame holds something other than it was announced with")
    return data


def render_header(name: str, size: int) -> bytes:
    """Of a plain file, in ustar form; sizes from 8 GiB on as GNU tar writes them."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "ascii")


def parse_size(header: bytes) -> int:
    """Of the first member. The caller compares the header with the one that is right for this size."""
    try:
        return int(header[124:135].decode("ascii"), 8)
    except ValueError:
        raise refused("it does not begin with a manifest") from None


def padding(size: int) -> int:
    return -size % TAR_BLOCK


def _decompressor() -> zstandard.ZstdDecompressor:
    made = getattr(_local, "decompressor", None)
    if made is None:
        made = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=FRAME)
    return made
