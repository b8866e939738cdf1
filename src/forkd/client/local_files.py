"""Files and directories of this machine, as copies to and from a sandbox read and write them.

What comes from a sandbox is not trusted: see wire/archive.py.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from forkd.client.arguments import CHUNK_BYTES, Data
from forkd.client.failures import error_of_body
from forkd.errors import ForkdError, HostLacks, InvalidInput, NoCapacity, NotFound, ProtocolError
from forkd.wire.archive import Exceeded, Torn, Unpacker, gather, pack
from forkd.wire.tar import PackFailed, TarError

# Up to this size a file is sent in one piece, which can be sent again when a connection breaks.
_WHOLE_BYTES = 1 << 20
_BAD_ARCHIVE = (TarError, Exceeded, PackFailed)

OnBytes = Callable[[int], object]


@contextmanager
def failing(verb: str, path: Path) -> Iterator[None]:
    """OSErrors of this machine's files become ours. A broken pipe is for whoever writes to one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise failure_of(error, verb, path) from error


def failure_of(error: OSError, verb: str, path: Path) -> ForkdError:
    said = f"{path} cannot be {verb}: {error.strerror}"
    if error.errno == errno.ENOENT:
        return NotFound(said, hint="Check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoCapacity(said, hint="Free some space, or choose another disk")
    if error.errno == errno.EEXIST:
        return InvalidInput(f"{path} is there already, and is not a file", hint="Move it out of the way")
    return HostLacks(said, hint="Check what is there, and whether it belongs to you")


def is_directory(path: Path) -> bool:
    return path.is_dir()


@contextmanager
def packing(source: Path, target: str, on_bytes: OnBytes | None) -> Iterator[Iterator[bytes]]:
    """An archive of a directory, which the guest unpacks inside the block. What was unpacked before a failure stays."""
    pieces = _pack(source, on_bytes)
    try:
        yield pieces
    except ForkdError as error:
        stays = f"What was copied before that stays in {target} of the sandbox"
        error.hint = f"{error.hint}. {stays}" if error.hint else stays
        raise
    finally:
        with suppress(ValueError):  # a thread is at it, and will let go of it
            pieces.close()


def _pack(source: Path, on_bytes: OnBytes | None) -> Generator[bytes, None, None]:
    """What it fails of has the path."""
    try:
        for piece in gather(pack(os.fspath(source))):
            if on_bytes is not None:
                on_bytes(len(piece))
            yield piece
    except Torn as error:
        assert isinstance(error.__cause__, OSError)
        raise failure_of(error.__cause__, "read", Path(str(error))) from error
    except OSError as error:
        raise failure_of(error, "read", Path(error.filename or source)) from error
    except Exceeded as error:
        raise InvalidInput(str(error), hint="Copy a directory further down") from error


@contextmanager
def unpacking(source: str, target: Path, max_bytes: int | None) -> Iterator[Unpacker]:
    """Inside the block an archive of the guest's `source` is fed to it. What was written before a failure stays."""
    with failing("written", target):
        made = not os.path.lexists(target)
        with suppress(FileExistsError):
            target.mkdir()
        unpacker = Unpacker(os.fspath(target), made=made, max_bytes=max_bytes)
    try:
        yield unpacker
        unpacker.finish()
    except (OSError, ForkdError, *_BAD_ARCHIVE) as error:
        failure = _explain(error, source, target)
        if unpacker.files:
            copied = "1 file, which stays" if unpacker.files == 1 else f"{unpacker.files} files, which stay"
            failure.message = f"{failure.message} (after {copied} in {target})"
            failure.args = (failure.message,)
        elif made:
            unpacker.close()
            with suppress(OSError):
                target.rmdir()
        raise failure from error
    finally:
        unpacker.close()


def _explain(error: Exception, source: str, target: Path) -> ForkdError:
    if isinstance(error, ForkdError):
        return error
    if isinstance(error, OSError):
        return failure_of(error, "written", target / str(error.filename or ""))
    if isinstance(error, Exceeded):
        return InvalidInput(f"{source} was not copied to its end: {error}", hint="Copy a directory further down")
    if isinstance(error, PackFailed):
        return error_of_body({"error": str(error), "code": error.code}, status=None, url="")
    return ProtocolError(f"The guest sent {error}")


def give(write: Callable[[bytes], object], data: bytes) -> None:
    write(data)


async def async_give(write: Callable[[bytes], object], data: bytes) -> None:
    """In a thread, since it writes to disk. When we are cancelled the thread is waited for: it uses open files."""
    import asyncio  # the synchronous client does not pay for it

    work = asyncio.create_task(asyncio.to_thread(write, data))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@contextmanager
def reading(source: Path, on_bytes: OnBytes | None) -> Iterator[tuple[Data, os.stat_result | None]]:
    """A file to send. Of a pipe or a device mode and time mean nothing for a file."""
    with failing("read", source):
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            regular = stat.S_ISREG(info.st_mode)
            chunks = chunks_of(file, on_bytes)
            data = b"".join(chunks) if regular and info.st_size <= _WHOLE_BYTES else chunks
            yield data, info if regular else None


def chunks_of(file: BinaryIO | FileIO, on_bytes: OnBytes | None = None) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        if on_bytes is not None:
            on_bytes(len(chunk))
        yield chunk


@contextmanager
def replacing(target: Path, mode: int, mtime_ns: int | None) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete. The target is the user's: if it is a link, it stays one."""
    with failing("written", target):
        target = Path(os.path.realpath(target))
        with suppress(FileNotFoundError):
            there = target.lstat()
            if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        temporary = target.with_name(f".forkd-{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                # Never set-id: the guest must not choose as whom it runs here.
                os.fchmod(fd, mode & 0o777)
                if mtime_ns is not None:
                    os.utime(fd, ns=(mtime_ns, mtime_ns))
            temporary.rename(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
