"""Commands: a program in a session of its own, its three streams (or its terminal) carried to the host and back."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import time

from forkd.agent.archive import parse_task
from forkd.agent.loop import READ
from forkd.agent.pipes import Outbox, Source
from forkd.agent.spawn import NotStarted, Plan, find_user, parse_report, spawn
from forkd.agent.stream import Refused, Stream
from forkd.wire.agent import FAIL, GRANT_BYTES, REPLY, STARTED, STDERR, STDOUT, WINDOW_BYTES, encode_json, encode_window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List

    from forkd.agent.loop import Loop, Timer
    from forkd.agent.port import Port
    from forkd.agent.stream import Done, Request

_MAX_ARGUMENTS = 4096
_TERMINAL_END_S = 0.5
_END_OF_INPUT = b"\x04"  # what a terminal takes for the end of its input


class Command(Stream):
    def __init__(
        self, number: int, request: Request, loop: Loop, port: Port, base_env: Dict[str, str], on_done: Done
    ) -> None:
        super().__init__(number)
        self._loop = loop
        self._port = port
        self._on_done = on_done
        self._stdin: Outbox | None = None
        self._sources: List[Source] = []
        self._terminal = -1
        self._started = False
        self._attached = True
        self._timed_out = False
        # A task of ours ends in order; a program might not.
        self._cancelled_by = signal.SIGTERM if "archive" in request else signal.SIGKILL
        self._timer: Timer | None = None
        self._closing_stdin = False
        self._owed = 0  # stdin written to the program, and not yet granted to the host again
        self._allowed = WINDOW_BYTES
        self._status: int | None = None
        self._plan = parse_plan(request, base_env)
        self._pid, self._report = self._launch(request, self._plan)
        loop.children[self._pid] = self._on_exit
        if self._report >= 0:
            loop.watch(self._report, READ, self._on_report)
        else:
            self._started = True
            self._send(STARTED, {"pid": self._pid})
        timeout_ms = request.get("timeout_ms") or 0
        if timeout_ms:
            self._timer = loop.call_at(time.monotonic() + timeout_ms / 1000, self._on_deadline)

    # From the host

    def on_data(self, payload: bytes) -> None:
        self._allowed -= len(payload)
        if self._allowed < 0:
            self._kill(signal.SIGKILL)  # our host does not send that; nothing else bounds our memory
            return
        if self._stdin is None or self._stdin.broken or self._closing_stdin:
            self._grant(len(payload))  # nobody reads it: treat it as written
            return
        written = self._stdin.send(payload)
        if not self._stdin.broken:
            self._grant(written)

    def on_end(self) -> None:
        if self._stdin is not None and not self._closing_stdin:
            self._closing_stdin = True
            if self._terminal >= 0:
                self._stdin.send(_END_OF_INPUT)
            elif not self._stdin.pending:
                self._close_stdin()

    def on_window(self, grant: int) -> None:
        self.credit += grant
        for source in self._sources:
            source.resume()

    def on_control(self, request: Request) -> None:
        if "signal" in request:
            number = request["signal"]
            if isinstance(number, int) and 0 < number < signal.NSIG:
                self._kill(number, group=request.get("group") is True)
        if "rows" in request and self._terminal >= 0:
            _resize(self._terminal, request)

    def on_cancel(self) -> None:
        self._detach()
        self._kill(self._cancelled_by)

    def on_detach(self) -> None:
        """In a fork of this machine the command lives on; only nobody hears it."""
        self._detach()

    # Life of the program

    def _launch(self, request: Request, plan: Plan) -> tuple[int, int]:
        theirs: List[int] = []
        try:
            if request.get("pty") is not None:
                self._open_terminal(request["pty"], theirs)
                plan.terminal = True
            else:
                self._open_pipes(request.get("stdin") is True, theirs)
            plan.fds = (theirs[0], theirs[1], theirs[2])
            return spawn(plan)
        except NotStarted as error:
            self._close_all()
            raise Refused("not_started", str(error), error.errno_name) from None
        except BaseException:
            self._close_all()
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)

    def _open_pipes(self, with_stdin: bool, theirs: List[int]) -> None:
        if with_stdin:
            read, write = os.pipe()
            theirs.append(read)
            self._open_stdin(write)
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for flag in (STDOUT, STDERR):
            read, write = os.pipe()
            theirs.append(write)
            self._open_source(read, flag)

    def _open_terminal(self, size: Dict[str, Any], theirs: List[int]) -> None:
        master, slave = os.openpty()
        theirs.extend((slave, slave, slave))
        self._terminal = master
        self._open_source(master, STDOUT)
        self._open_stdin(os.dup(master))
        _resize(master, size)

    def _open_stdin(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._stdin = Outbox(self._loop, fd)
        self._stdin.on_progress = self._on_stdin_progress
        self._stdin.on_broken = self._on_stdin_broken

    def _open_source(self, fd: int, flag: int) -> None:
        source = Source(self._loop, self._port, fd, flag)
        source.owner = self
        self._sources.append(source)

    def _on_report(self, _events: int) -> None:
        """The program runs, or could not be started."""
        self._loop.unwatch(self._report)
        failure = parse_report(os.read(self._report, 256), self._plan)
        os.close(self._report)
        self._started = True
        if failure is None:
            self._send(STARTED, {"pid": self._pid})
            return
        self._send(FAIL, {"code": "not_started", "message": str(failure), "errno": failure.errno_name})
        self._attached = False
        self._end()

    def _on_exit(self, status: int) -> None:
        self._status = status
        if not self._started:
            self._on_report(0)
        self._loop.cancel(self._timer)
        if not self._attached:
            self._end()
            return
        self._close_stdin()
        self._drain(list(self._sources))

    def _drain(self, sources: List[Source]) -> None:
        """Only what the program wrote itself; its children may hold its pipes and write more."""
        if sources and self._terminal >= 0:
            self._drain_terminal(sources.pop())
        elif sources:
            source = sources.pop()
            source.drain_counted(lambda: self._drain(sources))
        elif self._attached:
            self._send(REPLY, render_exit(self._status or 0, self._timed_out))
            self._attached = False
            self._end()

    def _drain_terminal(self, source: Source) -> None:
        """The kernel passes on what was written to a terminal a moment later, and counts it only then."""

        def give_up() -> None:
            source.drain_counted(lambda: self._drain([]))

        # Mostly nobody else holds the terminal: then its end comes right after the last output.
        self._timer = self._loop.call_at(time.monotonic() + _TERMINAL_END_S, give_up)
        source.drain_to_end(lambda: self._drain([]))

    def _end(self) -> None:
        self._close_all()
        self._loop.cancel(self._timer)
        self._on_done(self.number)

    def _detach(self) -> None:
        self._attached = False
        for source in self._sources:
            source.owner = None
            source.resume()
        self._close_stdin()
        if self._status is not None:
            self._close_all()

    # Its input

    def _on_stdin_progress(self, written: int) -> None:
        self._grant(written)
        if self._closing_stdin and self._stdin is not None and not self._stdin.pending and self._terminal < 0:
            self._close_stdin()

    def _on_stdin_broken(self) -> None:
        """The program closed its input: what is still sent is dropped, as in a shell's pipe."""
        self._grant(WINDOW_BYTES - self._allowed - self._owed)

    def _grant(self, size: int) -> None:
        self._owed += size
        if self._owed >= GRANT_BYTES and self._attached:
            self._allowed += self._owed
            self._port.send(encode_window(self.number, self._owed))
            self._owed = 0

    def _close_stdin(self) -> None:
        stdin, self._stdin = self._stdin, None
        if stdin is not None:
            stdin.close()

    # Its end

    def _on_deadline(self) -> None:
        self._timed_out = True
        self._kill(signal.SIGKILL)

    def _kill(self, number: int, group: bool = True) -> None:
        if self._status is not None:
            return  # reaped: the pid may mean another process
        try:
            # Before its exec the child may not have made its group yet; then there is only the child.
            if group and self._started:
                os.killpg(self._pid, number)
            else:
                os.kill(self._pid, number)
        except OSError:
            pass

    def _close_all(self) -> None:
        self._close_stdin()
        for source in self._sources:
            source.owner = None
            source.close()
        self._sources = []
        self._terminal = -1

    def _send(self, kind: int, answer: Dict[str, Any]) -> None:
        if self._attached:
            self._port.send(encode_json(kind, self.number, answer))


def parse_plan(request: Request, base_env: Dict[str, str]) -> Plan:
    if "archive" in request:
        plan = Plan([], base_env, (0, 0, 0))
        if request["archive"] == "changes":
            roots = request["facts"]["roots"]
            plan.keep = () if roots is None else (roots.image, roots.upper)
        plan.task = parse_task(request)
        return plan
    argv = request.get("argv")
    if "shell" in request:
        argv = ["/bin/sh", "-c", request["shell"]]
    if not isinstance(argv, list) or not 0 < len(argv) <= _MAX_ARGUMENTS:
        raise Refused("invalid", "A command needs a list of arguments")
    env = request.get("env") or {}
    cwd = request.get("cwd")
    texts = [*argv, *env, *env.values()] + ([] if cwd is None else [cwd])
    if not all(isinstance(text, str) and "\0" not in text for text in texts) or not argv[0]:
        raise Refused("invalid", "Arguments, environment and directory must be text without NUL")
    plan = Plan(argv, dict(base_env), (0, 0, 0))
    plan.cwd = cwd
    if request.get("user") is not None:
        plan.user = find_user(request["user"])
        if plan.user is None:
            raise Refused("not_started", "No such user: %s" % str(request["user"])[:100], "ENOENT")
        plan.env.update(HOME=plan.user.home)
        if plan.user.name is not None:
            plan.env.update(USER=plan.user.name, LOGNAME=plan.user.name)
    if request.get("pty") is not None:
        plan.env.setdefault("TERM", "xterm-256color")
    plan.env.update(env)
    return plan


def render_exit(status: int, timed_out: bool) -> Dict[str, Any]:
    answer: Dict[str, Any] = {"exit_code": None, "signal": None, "timed_out": timed_out}
    if os.WIFSIGNALED(status):
        answer["signal"] = os.WTERMSIG(status)
    else:
        answer["exit_code"] = os.WEXITSTATUS(status)
    return answer


def _resize(terminal: int, size: Dict[str, Any]) -> None:
    rows, cols = size.get("rows"), size.get("cols")
    if not (isinstance(rows, int) and isinstance(cols, int) and 0 < rows < 10000 and 0 < cols < 10000):
        raise Refused("invalid", "rows and cols must be between 1 and 9999")
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
