"""Files and directories between this machine and a sandbox. A directory is one tar stream, however many files it has.

The target is the name of the copy, not a directory to put it into. A directory that is there is filled.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from forkd.client.async_controller import AsyncController
from forkd.client.local_files import OnBytes, async_give, is_directory, packing, reading, replacing, unpacking
from forkd.client.results import CopyInfo
from forkd.errors import ForkdError

# A guest's files are in its memory; only sparse ones are larger than that.
DEFAULT_MAX_BYTES = 64 << 30
_DEFAULT_MODE = 0o644


async def async_upload(
    controller: AsyncController, sandbox_id: str, source: Path, target: str, on_bytes: OnBytes | None = None
) -> CopyInfo:
    """`on_bytes` is told how many bytes were sent, for each piece of them."""
    if is_directory(source):
        with packing(source, target, on_bytes) as pieces:
            answer = await controller.write_archive(sandbox_id, target, pieces)
        skipped = [(each["path"], each["why"]) for each in answer["skipped"]]
        return CopyInfo.of(answer["files"], answer["bytes"], skipped, os.fspath(source))
    with reading(source, on_bytes) as (data, info):
        mode, mtime_ns = (None, None) if info is None else (info.st_mode & 0o777, max(info.st_mtime_ns, 0))
        written = await controller.write_file(sandbox_id, target, data, mode, mtime_ns=mtime_ns)
    return CopyInfo(1, written["size"])


async def async_copy(
    controller: AsyncController,
    source_id: str,
    source: str,
    target_id: str,
    target: str,
    on_bytes: OnBytes | None = None,
) -> CopyInfo:
    """From one sandbox into another, as it comes: nothing is kept here."""
    copied = await _copy_directory(controller, source_id, source, target_id, target, on_bytes)
    if copied is not None:
        return copied
    info = await controller.stat_file(source_id, source)
    mode, mtime_ns = (info["mode"] & 0o777, max(info["mtime_ns"], 0)) if info["type"] == "file" else (None, None)
    async with aclosing(controller.read_file_stream(source_id, source)) as chunks:
        sent = _counted(chunks, on_bytes)
        written = await controller.write_file(target_id, target, sent, mode, mtime_ns=mtime_ns)
    return CopyInfo(1, written["size"])


async def _copy_directory(
    controller: AsyncController,
    source_id: str,
    source: str,
    target_id: str,
    target: str,
    on_bytes: OnBytes | None,
) -> CopyInfo | None:
    """None when the source is no directory."""
    async with aclosing(controller.read_archive(source_id, source)) as chunks:
        try:
            first = await anext(chunks, b"")
        except ForkdError as error:
            if error.code != "not_dir":
                raise
            return None
        try:
            sent = _chained(first, _counted(chunks, on_bytes))
            answer = await controller.write_archive(target_id, target, sent)
        except ForkdError as error:
            stays = f"What was copied before that stays in {target} of {target_id}"
            error.hint = f"{error.hint}. {stays}" if error.hint else stays
            raise
    skipped = [(each["path"], each["why"]) for each in answer["skipped"]]
    return CopyInfo.of(answer["files"], answer["bytes"], skipped, source)


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk


async def _counted(chunks: AsyncGenerator[bytes, None], on_bytes: OnBytes | None) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        if on_bytes is not None:
            on_bytes(len(chunk))
        yield chunk


async def async_download(
    controller: AsyncController,
    sandbox_id: str,
    source: str,
    target: Path,
    on_bytes: OnBytes | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> CopyInfo:
    try:
        return await async_download_directory(controller, sandbox_id, source, target, on_bytes, max_bytes)
    except ForkdError as error:
        if error.code != "not_dir":
            raise
    return await async_download_file(controller, sandbox_id, source, target, on_bytes)


async def async_download_directory(
    controller: AsyncController,
    sandbox_id: str,
    source: str,
    target: Path,
    on_bytes: OnBytes | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> CopyInfo:
    async with aclosing(controller.read_archive(sandbox_id, source)) as chunks:
        first = await anext(chunks, b"")  # before anything is made here: there may be no such directory
        with unpacking(source, target, max_bytes) as unpacker:
            await async_give(unpacker.feed, first)
            async for chunk in chunks:
                await async_give(unpacker.feed, chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
    return CopyInfo.of(unpacker.files, unpacker.bytes, unpacker.skipped, source)


async def async_download_file(
    controller: AsyncController, sandbox_id: str, source: str, target: Path, on_bytes: OnBytes | None = None
) -> CopyInfo:
    info = await controller.stat_file(sandbox_id, source)
    # What a link says of itself is not about the file.
    mode, mtime_ns = (info["mode"], info["mtime_ns"]) if info["type"] == "file" else (_DEFAULT_MODE, None)
    size = 0
    async with aclosing(controller.read_file_stream(sandbox_id, source)) as chunks:
        with replacing(target, mode, mtime_ns) as file:
            async for chunk in chunks:
                await async_give(file.write, chunk)
                size += len(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
    return CopyInfo(1, size)
