"""What callers hand over, checked and turned into what the API takes. Pure, but for files that are read."""

from __future__ import annotations

import enum
import os
import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any, TypedDict, Unpack

from forkd.errors import InvalidInput
from forkd.model.network import Network, parse_network
from forkd.wire.endpoint import find_loopback_port

if TYPE_CHECKING:
    from forkd.client.output import Callback

DEFAULT_TAG = "pyagent"
GUEST_HOME = "/root"
COMMAND_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 86400.0  # what the daemon takes, for a command
MAX_LIFETIME_S = 30 * 24 * 3600  # and for a sandbox
CHUNK_BYTES = 256 * 1024
_MAX_KEY = 200

GuestPath = str | os.PathLike[str]  # in the sandbox
Data = str | bytes | bytearray | memoryview | IO[Any] | Iterable[bytes] | Iterable[str]
AsyncData = Data | AsyncIterable[bytes] | AsyncIterable[str]


NetworkLike = Network | str | Mapping[str, Any]  # "none", "open", or rules


class BranchMode(enum.StrEnum):
    """How a running sandbox is frozen; texts, so that `mode="live"` says the same."""

    FULL = "full"
    DIFF = "diff"
    LIVE = "live"


class Limits(TypedDict, total=False):
    cpu_limit: float | None
    pids_limit: int | None
    io_limit_mib_s: int | None


class SandboxOptions(Limits, total=False):
    network: NetworkLike | None  # None: that of what it is forked from
    on_timeout: str | None  # "kill" or "pause"
    labels: Mapping[str, str] | None
    metadata: Mapping[str, str] | None


class ForkOptions(SandboxOptions, total=False):
    timeout_secs: float | None  # how long they may live
    env: Mapping[str, str] | None  # of their commands and code


class SpawnOptions(ForkOptions, total=False):
    allow_partial: bool
    agent_port: int | None


class CommandOptions(TypedDict, total=False):
    shell: str | None  # in place of args: one text for /bin/sh
    cwd: GuestPath | None
    env: Mapping[str, str] | None
    user: str | int | None


class CommandSpec(CommandOptions):
    args: Sequence[str] | None


class BackgroundOptions(TypedDict, total=False):
    envs: Mapping[str, str] | None
    user: str | int | None
    cwd: GuestPath | None
    stdin: str | bool | None


class RunOptions(BackgroundOptions, total=False):
    on_stdout: Callback | None
    on_stderr: Callback | None
    check: bool


def spec_of(
    cmd: str | Sequence[str], *, cwd: GuestPath | None, envs: Mapping[str, str] | None, user: str | int | None
) -> CommandSpec:
    """A text is a line of shell."""
    args, shell = (None, cmd) if isinstance(cmd, str) else (list(cmd), None)
    path = None if cwd is None else guest_path(cwd)
    return {"args": args, "shell": shell, "cwd": path, "env": check_envs(envs), "user": user}


def foreground_limit(timeout: float | None) -> float:
    """Seconds. 0 means no limit: the longest the daemon takes."""
    return COMMAND_TIMEOUT_S if timeout is None else _checked_seconds(timeout) or MAX_TIMEOUT_S


def background_limit(timeout: float | None) -> float | None:
    return None if timeout is None else _checked_seconds(timeout) or None


def code_limit(timeout: float | None, default_s: float) -> float:
    return default_s if timeout is None else _checked_seconds(timeout) or default_s


def check_lifetime(timeout: float | None) -> float | None:
    """How long a sandbox may live."""
    if timeout is not None and not 0 < _number(timeout) <= MAX_LIFETIME_S:
        raise InvalidInput(
            f"timeout must be above 0 and at most {MAX_LIFETIME_S} seconds, got {timeout:g}",
            hint="Give timeout=None for a sandbox that lives until it is killed",
        )
    return timeout


def _checked_seconds(timeout: float) -> float:
    if not 0 <= _number(timeout) <= MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout must be between 0 and {MAX_TIMEOUT_S:.0f} seconds, got {timeout:g}")
    return timeout


def _number(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        hint = "Did you mean background=True?" if timeout is True else None
        raise InvalidInput(f"timeout must be a number of seconds, got {timeout!a}", hint=hint)
    return timeout


def render_command(
    args: Sequence[str] | None,
    timeout_secs: float | None,
    stdin: str | bool | None,
    pty: tuple[int, int] | None = None,
    **options: Unpack[CommandOptions],
) -> dict[str, Any]:
    if isinstance(args, str):
        # Otherwise every letter would be an argument.
        raise InvalidInput("args must be a list of texts", hint='Use shell="…" for a line of shell')
    if (args is None) == (options.get("shell") is None):
        raise InvalidInput("A command needs either args or shell")
    return drop_unset(
        args=None if args is None else list(args),
        timeout_secs=timeout_secs,
        stdin=stdin or None,
        pty=None if pty is None else {"rows": pty[0], "cols": pty[1]},
        **render_options(CommandOptions, options),
    )


def render_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: not None, not False, not empty."""
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        raise TypeError(f"Unknown option: {', '.join(unknown)}")
    plain = {name: _plain(value) for name, value in options.items()}
    if plain.get("network") is not None:
        plain["network"] = render_network(options["network"])
    return {name: value for name, value in plain.items() if value is not None and value is not False and value != {}}


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return path_text(value)
    return dict(value) if isinstance(value, Mapping) else value


def render_network(network: NetworkLike | None) -> dict[str, Any] | None:
    return None if network is None else parse_network(network).as_json()


def drop_unset(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def check_key(key: str) -> str:
    if not 1 <= len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable() or key != key.strip():
        raise InvalidInput(f"An idempotency key must be 1 to {_MAX_KEY} printable ASCII characters")
    return key


def check_envs(envs: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Here, because the API has another name for them."""
    for name, value in (envs or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"envs must have text values, got {ascii(name)[:70]}: {type(value).__name__}")
    return envs


def choose_tag(tag: str | None, environ: Mapping[str, str] = os.environ) -> str:
    if tag is not None and not isinstance(tag, str):
        raise InvalidInput(f"tag must be the name of a snapshot, got {tag!a}")
    return tag or environ.get("FORKD_TAG") or DEFAULT_TAG


def port_of(target: str) -> int:
    port = find_loopback_port(target)
    if port is None:
        raise InvalidInput(f"A sandbox cannot be put at {target!a}", hint="Sandboxes answer at 127.0.0.1:<port>")
    return port


def path_text(path: GuestPath) -> str:
    """With slashes on every system: it is a path of Linux."""
    text = path.as_posix() if isinstance(path, PurePath) else os.fspath(path)
    if not isinstance(text, str):
        raise InvalidInput(f"A path in a sandbox must be a str or a pathlib path, got {type(text).__name__}")
    return text


def guest_path(path: GuestPath) -> str:
    """Relative paths start at the home of root, as with a command."""
    path = path_text(path)
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return posixpath.join(GUEST_HOME, path)


def check_format(format: str) -> str:
    if format not in ("text", "bytes", "stream"):
        raise InvalidInput(f"format must be text, bytes or stream, got {format!a}")
    return format


def decode_file(data: bytes, path: GuestPath) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text", hint='Read it with format="bytes"') from None


def encode(text: str) -> bytes:
    """Surrogates are how Python reads what is not UTF-8: they become the bytes they came from."""
    return text.encode("utf-8", "surrogateescape")


def content_of(data: Data) -> bytes | Iterator[bytes]:
    if isinstance(data, str | bytes | bytearray | memoryview):
        return _encoded(data)
    if (read := getattr(data, "read", None)) is not None:
        return _read(read)
    # A dict or a set is an iterable too, but nobody wants its keys as the content of a file.
    if isinstance(data, Iterable) and not isinstance(data, Mapping | Set):
        return (_encoded(piece) for piece in data)
    raise _not_content(data)


def async_content_of(data: AsyncData) -> bytes | AsyncIterator[bytes]:
    """Files and iterators are read in a thread: they may block."""
    if isinstance(data, AsyncIterable):
        return (_encoded(piece) async for piece in data)
    content = content_of(data)
    return content if isinstance(content, bytes) else _threaded(content)


async def _threaded(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    import asyncio  # the synchronous client does not pay for it

    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _read(read: Callable[[int], str | bytes]) -> Iterator[bytes]:
    while piece := read(CHUNK_BYTES):
        yield _encoded(piece)


def _encoded(piece: str | bytes | bytearray | memoryview) -> bytes:
    if isinstance(piece, str):
        return encode(piece)
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    raise _not_content(piece)


def _not_content(data: object) -> InvalidInput:
    return InvalidInput(
        f"A {type(data).__name__} cannot be written to a file",
        hint="Give text, bytes, an open file or an iterator of either; for JSON: json.dumps(...)",
    )
