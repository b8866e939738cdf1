"""Packet filter rules: a text is one transaction of nftables in the calling thread's network namespace."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from forkd.errors import HostLacks

_LIBRARY = "libnftables.so.1"
_OUTPUT_JSON = 1 << 4
_FD_SETSIZE = 1024
# For what other threads open meanwhile.
_ROOM = 24
_APART_DEADLINE_S = 30.0


class NftRefused(OSError):
    """The kernel or the parser refused a text; nothing of it is in force."""


@functools.cache
def load_library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise HostLacks(
            f"The library {_LIBRARY} is not on this host", hint="Install it: apt install libnftables1"
        ) from error
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    for name in ("nft_ctx_free", "nft_ctx_buffer_error", "nft_ctx_buffer_output"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_error_buffer", "nft_ctx_get_output_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    return library


def run(text: str) -> str:
    """What it printed. Raises NftRefused, then nothing has changed."""
    return _run(text, 0)


def run_json(text: str) -> list[dict[str, Any]]:
    """The objects that a `list` command prints."""
    printed = _run(text, _OUTPUT_JSON)
    return list(json.loads(printed)["nftables"]) if printed else []


def move_away(descriptor: int) -> int:
    """Another number for a descriptor that lasts, so that the library finds one that it can use. Takes it over."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FD_SETSIZE)
    finally:
        os.close(descriptor)


def _run(text: str, flags: int) -> str:
    if _is_crowded():
        return _run_apart(text, flags)
    with _context() as context:
        load_library().nft_ctx_output_set_flags(context, flags)
        return _talk(context, text)


def _is_crowded() -> bool:
    """The library waits with select, and the process would be aborted where its socket has a higher number."""
    descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(descriptor)
    return descriptor >= _FD_SETSIZE - _ROOM


def _run_apart(text: str, flags: int) -> str:
    """In a process of its own, which has few descriptors."""
    argv = [sys.executable, "-I", "-m", __name__, str(flags)]
    try:
        done = subprocess.run(argv, input=text.encode(), capture_output=True, timeout=_APART_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NftRefused(f"nftables took more than {_APART_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise NftRefused(_decode(done.stderr).strip() or "nftables gave no reason")
    return _decode(done.stdout)


@contextlib.contextmanager
def _context() -> Iterator[int]:
    # One for each text: its socket belongs to the namespace that it is made in.
    library = load_library()
    context = library.nft_ctx_new(0)
    if not context:
        raise NftRefused("No context of nftables: out of descriptors or memory")
    try:
        library.nft_ctx_buffer_error(context)
        library.nft_ctx_buffer_output(context)
        yield context
    finally:
        library.nft_ctx_free(context)


def _talk(context: int, text: str) -> str:
    library = load_library()
    if library.nft_run_cmd_from_buffer(context, text.encode()) != 0:
        raise NftRefused(_decode(library.nft_ctx_get_error_buffer(context)).strip() or "nftables gave no reason")
    return _decode(library.nft_ctx_get_output_buffer(context))


def _decode(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace")


if __name__ == "__main__":
    try:
        sys.stdout.write(_run(sys.stdin.read(), int(sys.argv[1])))
    except NftRefused as error:
        sys.exit(str(error))
