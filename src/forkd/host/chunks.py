"""Checksums of a file by chunks, so that damage has a place. Large files are hashed on several cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

CHUNK = 4 * 1024 * 1024
_MAX_THREADS = 4


def hash_chunks(path: Path) -> tuple[int, tuple[str, ...]]:
    """The file's size, and the SHA-256 of each of its chunks. Holes are not read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        starts = range(0, size, CHUNK)
        threads = min(len(starts), _MAX_THREADS, os.cpu_count() or 1)
        if threads < 2:
            return size, tuple(_hash_chunk(fd, start, size) for start in starts)
        with ThreadPoolExecutor(threads, "hash") as pool:
            return size, tuple(pool.map(lambda start: _hash_chunk(fd, start, size), starts))
    finally:
        os.close(fd)


def join_hashes(chunks: Iterable[str]) -> str:
    """The SHA-256 of a file with chunks: that of their hashes."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, chunks))).hexdigest()


def count_chunks(size: int) -> int:
    return -(-size // CHUNK)


def render_place(chunk: int, size: int) -> str:
    """Which bytes of a file a chunk is."""
    return f"bytes {chunk * CHUNK} to {min(size, (chunk + 1) * CHUNK) - 1}"


def _hash_chunk(fd: int, start: int, size: int) -> str:
    length = min(CHUNK, size - start)
    if _is_hole(fd, start, length):
        return _hash_zeros(length)
    digest = hashlib.sha256()
    done = 0
    while done < length:
        data = os.pread(fd, length - done, start + done)
        if not data:  # it has become shorter: the hash will not match
            break
        digest.update(data)
        done += len(data)
    return digest.hexdigest()


def _is_hole(fd: int, start: int, length: int) -> bool:
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= start + length
    except OSError:  # nothing but a hole up to the end
        return os.fstat(fd).st_size >= start + length


@lru_cache(maxsize=4)
def _hash_zeros(length: int) -> str:
    return hashlib.sha256(bytes(length)).hexdigest()
