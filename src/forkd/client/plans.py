"""What Sandbox does that takes more than one call, written once for both shells."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forkd.client.call import Plan
from forkd.client.calls import commands, files, sandboxes, snapshots
from forkd.client.calls.commands import MAX_TIMEOUT_S, Command
from forkd.client.calls.sandboxes import Spawn
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NotFound, NotRunning
from forkd.wire.api import FileInfo, FileListing, ProcessInfo, SandboxInfo, SnapshotInfo
from forkd.wire.endpoint import find_loopback_port

DEFAULT_TAG = "pyagent"
GUEST_HOME = "/root"
COMMAND_TIMEOUT_S = 60.0
SIGKILL = 9
_LOGIN_SHELL = "command -v bash >/dev/null && exec bash -l; exec sh -l"
MAX_STDIN_BYTES = 512 * 1024  # of one request


def choose_tag(tag: str | None, environ: Mapping[str, str] = os.environ) -> str:
    return tag or environ.get("FORKD_TAG") or DEFAULT_TAG


def create(spawn: Spawn) -> Plan[SandboxInfo]:
    made: list[SandboxInfo] = yield sandboxes.spawn_sandboxes(spawn)
    return made[0]


def open_sandbox(tag: str | None, target: str | None, spawn: bool) -> Plan[SandboxInfo]:
    """What the constructor does: fork one, at the port of `target` if given; or find the one that answers there."""
    if spawn:
        port = None if target is None else _port_of(target)
        return create(Spawn(choose_tag(tag), agent_port=port))
    return find_by_address(target or os.environ.get("FORKD_TARGET"))


def find_by_address(target: str | None) -> Plan[SandboxInfo]:
    if not target:
        raise InvalidInput("No target to find a sandbox by", hint="Give target=, or a sandbox id to Sandbox.connect")
    for info in (yield from sandboxes.list_sandboxes()):
        if info["guest_addr"] == target:
            return info
    raise NotFound(f"No sandbox answers at {target}", hint="The addresses are guest_addr in: forkd ls --json")


def connect(sandbox_id: str, timeout_secs: float | None) -> Plan[SandboxInfo]:
    """One that is paused goes on, as with E2B."""
    info: SandboxInfo = yield sandboxes.get_sandbox(sandbox_id)
    if info["state"] == "paused":
        info = yield sandboxes.resume_sandbox(sandbox_id)
    if timeout_secs is not None:
        info = yield sandboxes.set_sandbox_timeout(sandbox_id, timeout_secs, None)
    return info


def kill(sandbox_id: str) -> Plan[bool]:
    try:
        yield sandboxes.kill_sandbox(sandbox_id)
    except NotFound:
        return False
    return True


def is_running(sandbox_id: str) -> Plan[bool]:
    try:
        info: SandboxInfo = yield sandboxes.get_sandbox(sandbox_id)
    except NotFound:
        return False
    return info["state"] == "running"


def fork(sandbox_id: str, count: int) -> Plan[list[SandboxInfo]]:
    """Freeze it where it is, then fork that. A branch nobody came from is not left behind."""
    branch: SnapshotInfo = yield sandboxes.branch_sandbox(sandbox_id, None, False, False, None, True)
    try:
        made: list[SandboxInfo] = yield sandboxes.spawn_sandboxes(Spawn(branch["tag"], count))
    except ForkdError:
        yield snapshots.delete_snapshot(branch["tag"])
        raise
    return made


def kill_process(sandbox_id: str, pid: int) -> Plan[bool]:
    """False when it had ended, or its sandbox had."""
    try:
        yield commands.signal_process(sandbox_id, pid, SIGKILL)
    except NotRunning:
        raise
    except (NotFound, Conflict, GuestDied):
        return False
    return True


def write_stdin(sandbox_id: str, pid: int, data: str | bytes) -> Plan[None]:
    """In as many requests as it takes, one after the other."""
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
    for start in range(0, len(raw), MAX_STDIN_BYTES):
        yield commands.write_stdin(sandbox_id, pid, raw[start : start + MAX_STDIN_BYTES], False)


def find_file(sandbox_id: str, path: str) -> Plan[FileInfo | None]:
    try:
        info: FileInfo = yield files.stat_file(sandbox_id, path)
    except ForkdError as error:
        if not isinstance(error, NotFound) and error.code != "not_dir":
            raise
        yield sandboxes.get_sandbox(sandbox_id)  # raises when it is the sandbox that does not exist
        return None
    return info


def list_directory(sandbox_id: str, path: str) -> Plan[list[FileInfo]]:
    listing: FileListing = yield files.list_files(sandbox_id, path)
    if listing["truncated"]:
        raise InvalidInput(f"{path} has more entries than are listed", hint="List it with: commands.run('ls …')")
    return listing["entries"]


def guest_path(path: str) -> str:
    """Relative paths start at the home of root, as with a command."""
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return posixpath.join(GUEST_HOME, path)


def command_of(
    cmd: str | Sequence[str],
    *,
    timeout: float | None,
    background: bool,
    cwd: str | None,
    envs: Mapping[str, str] | None,
    user: str | int | None,
    stdin: str | bool | None,
    pty: tuple[int, int] | None = None,
) -> Command:
    """A text is a line of shell. 0 is no timeout: the longest there is, in the background none at all."""
    if isinstance(timeout, bool):
        raise InvalidInput("timeout is a number of seconds", hint="Did you mean background=True?")
    if timeout is None and not background:
        timeout = COMMAND_TIMEOUT_S
    limit = timeout or (None if background else MAX_TIMEOUT_S)
    args, shell = (None, cmd) if isinstance(cmd, str) else (list(cmd), None)
    place = None if cwd is None else guest_path(cwd)
    return Command(args, shell, limit, place, envs, user, stdin, pty)


def _port_of(target: str) -> int:
    port = find_loopback_port(target)
    if port is None:
        raise InvalidInput(f"{target!a} is no address for a sandbox", hint="Sandboxes answer at 127.0.0.1:<port>")
    return port


def start_command(sandbox_id: str, command: Command) -> Plan[int]:
    """In the background. A text for its input is written and the input closed; True leaves it open."""
    text = command.stdin
    info: ProcessInfo = yield commands.start_process(
        sandbox_id, replace(command, stdin=text is not None and text is not False)
    )
    if isinstance(text, str):
        yield from write_stdin(sandbox_id, info["pid"], text)
        yield commands.write_stdin(sandbox_id, info["pid"], b"", True)
    return info["pid"]


def terminal_of(
    rows: int,
    cols: int,
    cmd: str | Sequence[str] | None,
    *,
    cwd: str | None,
    envs: Mapping[str, str] | None,
    user: str | int | None,
    timeout: float | None,
) -> Command:
    return command_of(
        _LOGIN_SHELL if cmd is None else cmd,
        timeout=timeout,
        background=True,
        cwd=cwd,
        envs={"TERM": "xterm-256color", **(envs or {})},
        user=user,
        stdin=None,
        pty=(rows, cols),
    )


def rename(sandbox_id: str, old: str, new: str) -> Plan[FileInfo]:
    yield files.rename_file(sandbox_id, old, new)
    info: FileInfo = yield files.stat_file(sandbox_id, new)
    return info


def make_directory(sandbox_id: str, path: str) -> Plan[bool]:
    found = yield from find_file(sandbox_id, path)
    if found is not None and found["type"] == "dir":
        return False
    yield files.make_dir(sandbox_id, path, True)
    return True


def check_format(format: str) -> str:
    if format not in ("text", "bytes", "stream"):
        raise InvalidInput(f"{format!a} is no format", hint="Use text, bytes or stream")
    return format
