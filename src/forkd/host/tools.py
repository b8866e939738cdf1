"""Programs of the host: found, asked for their version, run to their end within a deadline, in namespaces or not."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import BuildFailed, ForkdError, HostLacks, NoCapacity
from forkd.host.trees import remove_directory

_PACKAGES = {
    "busybox": "busybox-static",
    "fallocate": "util-linux",
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "newuidmap": "uidmap",
    "qemu-system-x86_64": "qemu-system-x86",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
# A user's PATH often lacks the sbin directories, where some programs are.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_PASSED_ON = ("HOME", "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")

_ANSWER_S = 5.0
_NAMESPACES_S = 20.0
_REMOVE_S = 120.0
_TAIL_LINES = 25
_MAX_LINE_BYTES = 4096
_MAX_READS = 4
_SILENCE_DEADLINE_S = 5.0
_TICK_S = 0.2
_DISK_FULL_BYTES = 1 << 20
_DISK_FULL_WORDS = ("no space left on device", "disk quota exceeded", "enough free space in")


def find_program(name: str) -> str | None:
    return shutil.which(name, path=_search_path())


def find_tool(name: str) -> Path:
    """Raises HostLacks with the package to install."""
    found = find_program(name)
    if found is None:
        package = _PACKAGES.get(name, name)
        raise HostLacks(f"{name} is not installed", hint=f"Install it: apt install {package}")
    return Path(found)


def ask(*argv: str | Path) -> str:
    """What a program prints, with any exit status; nothing when it cannot be run or does not end in time."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_S,
            check=False,
            env={"PATH": f"{os.defpath}:{_SBIN}", "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def parse_version(text: str) -> tuple[int, ...] | None:
    match = re.search(r"\b(\d+(?:\.\d+)+)", text)
    return tuple(map(int, match[1].split("."))) if match else None


def tool_environment(**extra: str) -> dict[str, str]:
    """What a tool may see of our environment: where programs are, the proxies, and messages in English."""
    passed = {key: os.environ[key] for name in _PASSED_ON for key in (name, name.upper()) if key in os.environ}
    return {"PATH": _search_path(), "LC_ALL": "C.UTF-8", **passed, **extra}


def run_tool(
    argv: Sequence[str | Path],
    *,
    doing: str,
    failure: type[ForkdError],
    deadline_s: float,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    disk: Path | None = None,
) -> None:
    """Run a program to its end, or raise `failure` with its last lines.

    It gets its own process group, which is killed when we leave by an exception, and dies with us when we are
    killed. When space runs out (the output says so, or `disk` was seen full) it raises NoCapacity.
    """
    command = [str(find_tool("setpriv")), "--pdeathsig", "KILL", "--", *map(str, argv)]
    seen = _Output(on_line, disk)
    with _interrupts_held() as let_go:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o022,
            env=dict(env if env is not None else tool_environment()),
        )
        in_time = False
        try:
            let_go()
            in_time = _follow(process, seen, time.monotonic() + deadline_s)
        finally:
            # The leader is not reaped yet, so the number still means this group.
            _kill_group(process.pid)
            process.wait()
            if not in_time:
                _await_silence(process)
            if process.stdout is not None:
                process.stdout.close()
    if not in_time:
        raise failure(f"{doing} did not end within {deadline_s:g} s", details=seen.tail())
    if process.returncode != 0:
        if seen.disk_full:
            raise NoCapacity(
                f"{doing} failed: no space left{f' on the file system of {disk}' if disk else ''}",
                hint="Free some space or set FORKD_HOME to another disk",
                details=seen.tail(),
            )
        raise failure(f"{doing} failed ({_ended_how(process.returncode)})", details=seen.tail())


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """An interrupt while a process is being started comes when `let_go` is called: then there is someone to end it."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    holding = ExitStack()

    @holding.callback
    def put_back() -> None:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)

    with holding:
        yield holding.close


def run_namespaced(
    argv: Sequence[str | Path],
    *,
    doing: str,
    deadline_s: float,
    failure: type[ForkdError] = BuildFailed,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    disk: Path | None = None,
) -> None:
    """As `run_tool`, in fresh mount and pid namespaces, for tools that need root or a root directory of their own.

    Mounts made there never show on the host, and the pid namespace takes every process with it when it ends, also
    those that left the process group.
    """
    command = render_namespaced(argv, unshare=find_tool("unshare"), as_root=os.geteuid() == 0)
    run_tool(command, doing=doing, failure=failure, deadline_s=deadline_s, on_line=on_line, env=env, disk=disk)


def render_namespaced(argv: Sequence[str | Path], *, unshare: str | Path, as_root: bool) -> list[str]:
    """A user other than root also gets a range of ids, so that files get the owners they have in the image."""
    user = [] if as_root else ["--user", "--map-root-user", "--map-auto"]
    return [str(unshare), *user, "--mount", "--pid", "--fork", "--kill-child=KILL", "--", *map(str, argv)]


def remove_tree(path: Path) -> None:
    """Remove a directory whose files may belong to our subordinate ids: only a namespace can remove those."""
    remove_directory(path)
    if path.exists():
        run_namespaced(["rm", "-rf", "--", path], doing=f"Removing {path}", deadline_s=_REMOVE_S)


def check_namespaces(deadline_s: float = _NAMESPACES_S) -> None:
    """Raise HostLacks where this user cannot make the namespaces that images are built in."""
    as_root = os.geteuid() == 0
    for tool in ["unshare"] if as_root else ["unshare", "newuidmap"]:
        find_tool(tool)
    try:
        run_namespaced(["true"], doing="Making namespaces", deadline_s=deadline_s, failure=HostLacks)
    except HostLacks as error:
        message = "Images are built in namespaces, and this user may not make them"
        raise HostLacks(message, hint=namespace_hint(as_root=as_root), details=error.details) from error


def namespace_hint(*, as_root: bool) -> str:
    if as_root:
        return "Root needs CAP_SYS_ADMIN here: start the container with it"
    return "Allow user namespaces, give this user a range in /etc/subuid and /etc/subgid, or run as root"


@dataclass
class _Output:
    """The lines of a tool: passed on, and the last ones kept."""

    on_line: Callable[[str], None] | None
    disk: Path | None
    disk_full: bool = False

    def __post_init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _MAX_LINE_BYTES:
            self._take(self._rest)
            self._rest = b""

    def finish(self) -> None:
        self._take(self._rest)
        self._rest = b""

    def look_at_disk(self) -> None:
        if self.disk is not None and shutil.disk_usage(self.disk).free < _DISK_FULL_BYTES:
            self.disk_full = True

    def tail(self) -> str:
        return "\n".join(self._lines)

    def _take(self, raw: bytes) -> None:
        text = raw[:_MAX_LINE_BYTES].decode(errors="replace")
        line = "".join(c if c.isprintable() else " " for c in text).rstrip()
        if not line:
            return
        self._lines.append(line)
        self.disk_full |= any(words in line.lower() for words in _DISK_FULL_WORDS)
        if self.on_line is not None:
            self.on_line(line)


def _follow(process: subprocess.Popen[bytes], seen: _Output, until: float) -> bool:
    """Read the output until the program ends; False when the deadline comes first."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        open_pipe = True
        while True:
            if open_pipe and selector.select(_TICK_S):
                open_pipe = _read_available(fd, seen)
                if not open_pipe:
                    selector.unregister(fd)
            seen.look_at_disk()
            if _has_ended(process.pid):
                # Not until the end of the pipe: a grandchild that lives on may hold it open.
                if open_pipe:
                    _read_available(fd, seen)
                seen.finish()
                return True
            if time.monotonic() > until:
                return False
            if not open_pipe:
                time.sleep(_TICK_S / 10)


def _read_available(fd: int, seen: _Output) -> bool:
    """Take what is there, and not more than that: a flood must not outrun the deadline. False at the end."""
    for _ in range(_MAX_READS):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        seen.feed(data)
    return True


def _await_silence(process: subprocess.Popen[bytes]) -> None:
    """Wait until nobody holds the pipe: killed processes may take a moment to stop writing to our files."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    os.set_blocking(fd, False)
    until = time.monotonic() + _SILENCE_DEADLINE_S
    while time.monotonic() < until:
        try:
            if not os.read(fd, 1 << 16):
                return
        except BlockingIOError:
            time.sleep(_TICK_S / 10)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pgid: int) -> None:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _ended_how(returncode: int) -> str:
    return f"exit status {returncode}" if returncode >= 0 else f"signal {-returncode}"


def _search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
